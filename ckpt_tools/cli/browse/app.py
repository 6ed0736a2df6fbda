"""The screen of `browse`: a tree, and beside it what is known of the entry under the cursor."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from time import sleep
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import DataTable, Footer, Header, Input, Static, Tree
from textual.worker import get_current_worker

from ckpt_tools.cli import entries, show
from ckpt_tools.cli.browse.sides import Arrangement, Sides, kinds, status_text
from ckpt_tools.cli.diff import HEADER
from ckpt_tools.cli.diff import row as diff_row
from ckpt_tools.cli.ls import Leaf, Node, joined, tree_of
from ckpt_tools.cli.show import Corner
from ckpt_tools.core.index import Entry, TensorEntry
from ckpt_tools.core.text import format_size
from ckpt_tools.errors import CkptError, printable

if TYPE_CHECKING:
    from rich.style import Style
    from textual.widgets.tree import TreeNode

_BAR = 10
_PAUSE = 0.05  # seconds that the cursor rests before files are read
_MOST_CHUNKS = 500  # in a table on the screen
_LABEL = 45  # columns of what stands before and behind a name
_OPENED_AT_ONCE = 200  # leaves that a search may find and still show all of


class Shown(NamedTuple):
    """A line of the tree: what stands there, and the bytes of the largest of its siblings."""

    place: Node | Leaf
    most: int

    @property
    def below(self) -> list[Leaf]:
        """The leaf itself, or every leaf below."""
        return [self.place] if isinstance(self.place, Leaf) else list(self.place.walk())


class _Stopped(Exception):
    """Somebody left while values were compared."""


class Entries(Tree[Shown]):
    """The tree; its keys are those of ncdu, too. What stands on a line is made when it is seen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Open"),
        Binding("right,l", "open", "Open", show=False),
        Binding("left,h", "cursor_parent", "Up", show=False),
    ]

    def __init__(self, label: str, sides: Sides) -> None:
        super().__init__(Text(label))
        self._sides = sides
        self._behind: dict[int, Text] = {}  # what stands behind names, by their nodes

    def action_open(self) -> None:
        """Open the part under the cursor."""
        if self.cursor_node is not None and self.cursor_node.allow_expand:
            self.cursor_node.expand()

    def show(self, root: Node, count: int) -> None:
        """Show another tree, of ``count`` leaves; one of few leaves is opened."""
        self.clear()
        self._behind.clear()
        self.root.data = Shown(root, root.nbytes)
        self._fill(self.root, every=count <= _OPENED_AT_ONCE)
        self.root.expand()
        self.cursor_line = 0

    def again(self) -> None:
        """Render all lines again."""
        self._behind.clear()
        self.root.refresh()
        self.refresh()

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[Shown]) -> None:
        """Add what is below a part when it is first opened."""
        self._fill(event.node)

    def _fill(self, node: TreeNode[Shown], *, every: bool = False) -> None:
        """Add the lines below a part, largest first; with ``every`` also those below them."""
        if node.children or node.data is None or isinstance(node.data.place, Leaf):
            return
        below: list[tuple[str, Node | Leaf]] = [
            (leaf.name, leaf) for leaf in node.data.place.leaves
        ]
        for part, start in node.data.place.below.items():
            name, branch = (part, start) if node.is_root else joined(part, start)
            is_leaf = not branch.below and len(branch.leaves) == 1
            below.append((name, branch.leaves[0] if is_leaf else branch))
        most = max((place.nbytes for _, place in below), default=0)
        for name, place in sorted(below, key=lambda item: (-item[1].nbytes, item[0])):
            if isinstance(place, Leaf):
                node.add_leaf(Text(printable(name)), Shown(place, most))
                continue
            child = node.add(Text(printable(name)), Shown(place, most))
            if every:
                self._fill(child, every=True)
                child.expand()

    def get_label_width(self, node: TreeNode[Shown]) -> int:
        """About the width of a line, without making it."""
        return len(node.label) + _LABEL

    def render_label(self, node: TreeNode[Shown], base_style: Style, style: Style) -> Text:
        """A line: size, bar, name, type and shape or sums, and what differs."""
        label = Text(style=style)
        if node.data is not None and not node.is_root:
            filled = round(_BAR * node.data.place.nbytes / max(node.data.most, 1))
            size = format_size(node.data.place.nbytes)
            label.append(f"{size:>8} {'█' * filled}{'░' * (_BAR - filled)} ", "cyan")
        if node.allow_expand:
            label.append("▼ " if node.is_expanded else "▶ ", base_style)
        label.append(str(node.label))
        if node.data is not None:
            if node.id not in self._behind:
                self._behind[node.id] = self._said(node.data)
            label.append(self._behind[node.id])
        return label

    def _said(self, shown: Shown) -> Text:
        """What stands behind a name: type and shape, or how much is below; and what differs."""
        leaves = {leaf.name: leaf.entry for leaf in shown.below}
        counts = Counter(map(self._sides.status, leaves))
        if isinstance(shown.place, Leaf):
            entry, (status,) = shown.place.entry, counts
            cells = entries.row(entry, None)[1 : 3 if isinstance(entry, TensorEntry) else 2]
            colour = {"": "", "same": "green", "unknown": "yellow"}.get(status, "bold red")
            return Text.assemble(
                ("  ".join(["", *cells, ""]), "dim"), (status_text(status), colour)
            )
        wrong = len(leaves) - counts[""] - counts["same"]
        if wrong:
            word = "differ" if self._sides.two else "damaged"
            mark = Text(f"  {wrong:,} of {len(leaves):,} {word}", "bold red")
        else:
            mark = Text("  same" if set(counts) == {"same"} else "", "green")
        return Text.assemble((f"  {kinds(leaves.values())}", "dim"), mark)


class Side(VerticalScroll):
    """What one checkpoint has: facts, chunks, values."""

    def __init__(self, sides: Sides, number: int) -> None:
        super().__init__()
        self._sides = sides
        self._number = number

    def compose(self) -> ComposeResult:
        """The widgets, from top to bottom."""
        yield Static(classes="facts")
        yield Static(classes="text")
        yield DataTable(classes="values")
        yield DataTable(classes="chunks", cursor_type="row", zebra_stripes=True)

    def say(self, text: str) -> None:
        """Show only a text; it may have the colours of a terminal."""
        self.query_one(".facts", Static).update(Text.from_ansi(text))
        self.query_one(".text", Static).update("")
        for table in self.query(DataTable):
            table.clear(columns=True).display = False

    def show(self, entry: Entry | None) -> None:
        """Show what headers say of an entry."""
        self.say("not here" if entry is None else self._sides.facts(entry, self._number))
        if isinstance(entry, TensorEntry):
            table = self.query_one(".chunks", DataTable)
            table.display = True
            table.add_columns(*show.CHUNK_HEADER)
            root = self._sides.indexes[self._number].root
            for row in show.chunk_rows(entry, root, _MOST_CHUNKS):
                table.add_row(*map(Text, row))

    def show_values(self, values: Corner | str) -> None:
        """Show a text, or a row for each index of all dimensions but the last."""
        text = values if isinstance(values, str) else f"{values.noun} of {values.box}"
        self.query_one(".text", Static).update(Text(text))
        table = self.query_one(".values", DataTable)
        table.clear(columns=True).display = not isinstance(values, str)
        if isinstance(values, str):
            return
        first, width = (
            (*values.box.offsets, 0)[len(values.box.sizes[1:])],
            (values.box.sizes or (1,))[-1],
        )
        table.add_columns("", *map(str, range(first, first + width)))
        texts = list(map(show.value_text, values.values))
        for start in range(0, len(texts), max(width, 1)):
            table.add_row(_row_name(values, start // width), *texts[start : start + width])


def _row_name(values: Corner, number: int) -> str:
    """The place of a row of values in all dimensions but the last."""
    place: list[str] = []
    for offset, size in zip(values.box.offsets[-2::-1], values.box.sizes[-2::-1], strict=True):
        place.insert(0, str(offset + number % size))
        number //= size
    return ",".join(place)


class Browser(App[None]):
    """The application: `sides` is what it walks through."""

    TITLE = "ckpt-tools browse"
    CSS = """
    * { scrollbar-size: 1 1; }
    Entries { width: 1fr; min-width: 40; }
    .-two #details { width: 3fr; }
    .-two Entries { width: 2fr; }
    #details { width: 1fr; border-left: solid $primary; }
    .-narrow #main { layout: vertical; }
    .-narrow Entries, .-narrow #details { width: 100%; height: 1fr; border-left: none; }
    .facts, .text { height: auto; padding: 0 1; }
    #message { height: auto; padding: 0 1; }
    DataTable { height: auto; max-height: 24; margin: 1 0 0 1; }
    #asked Input { display: none; }
    #asked { height: auto; }
    """
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012 (textual's own annotation)
        (0, "-narrow"),
        (110, "-wide"),
    ]
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "ask('search')", "Search", key_display="/"),
        Binding("colon", "ask('slice')", "Slice", key_display=":"),
        Binding("s", "arrange('section')", "Sections"),
        Binding("n", "arrange('name')", "Names"),
        Binding("f", "arrange('file')", "Ranks"),
        Binding("c", "compare", "Compare values"),
        Binding("d", "differing", "Differing only"),
        Binding("escape", "leave", "Back", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, sides: Sides) -> None:
        super().__init__()
        self.sides = sides
        self._arrangement: Arrangement = "section"
        self._text = ""
        self._differing = False

    def compose(self) -> ComposeResult:
        """Header, tree and details, what is asked for, and the keys."""
        yield Header(icon=" ")
        with Horizontal(id="main", classes="-two" if self.sides.two else ""):
            yield Entries("everything", self.sides)
            with Vertical(id="details"):
                yield Static(id="message")
                with Horizontal():
                    for number, _ in enumerate(self.sides.indexes):
                        yield Side(self.sides, number)
        with Vertical(id="asked"):
            yield Input(placeholder="part of a name, a glob, or re:…", id="search")
            yield Input(placeholder="slice of the values: 0:4,:8", id="slice")
        yield Footer()

    def on_mount(self) -> None:
        """Begin at the root."""
        self.sub_title = " | ".join(printable(index.root) for index in self.sides.indexes)
        self.tree_widget.focus()
        self.arrange()

    @property
    def tree_widget(self) -> Entries:
        """The tree."""
        return self.query_one(Entries)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002 (textual's signature)
        """Whether a key does anything: some are for two checkpoints alone."""
        return self.sides.two or action not in ("compare", "differing")

    # ------------------------------------------------------------------------------------- the tree

    @work(thread=True, exclusive=True, group="tree")
    def arrange(self) -> None:
        """Build the tree again: in its arrangement, of what is searched for."""
        worker = get_current_worker()
        try:
            leaves = self.sides.leaves(self._arrangement, self._text, differing=self._differing)
        except CkptError as error:
            self.call_later(self._warn, error)
            return
        root = tree_of(leaves)
        if not worker.is_cancelled:
            self.call_later(self._show_tree, root, len(leaves))

    def _show_tree(self, root: Node, count: int) -> None:
        self.tree_widget.show(root, count if self._text else sys.maxsize)
        self._show_details(self.tree_widget.root)
        if not count:
            self.notify("Nothing is left to show.")

    # ---------------------------------------------------------------------------------- the details

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[Shown]) -> None:
        """Show what the cursor is on."""
        self._show_details(event.node)

    def _show_details(self, node: TreeNode[Shown]) -> None:
        self.query_one("#slice", Input).value = ""
        place = None if node.data is None else node.data.place
        if node.is_root:
            self._say("")
            self._report()
        elif isinstance(place, Leaf):
            self._say(self._difference(place.name))
            for side, entry in zip(self.panes, self.sides.entries(place.name), strict=True):
                side.show(entry)
            self._read(place.name, None)
        elif node.data is not None:
            self._say(self.sides.summary(node.data.below))
            for side in self.panes:
                side.say("")

    @property
    def panes(self) -> Sequence[Side]:
        """What is shown of each side."""
        return list(self.query(Side))

    def _difference(self, name: str) -> str:
        """What `diff` says of one name, a line for each column of its table."""
        entry_diff = self.sides.difference(name)
        status = self.sides.status(name)
        if entry_diff is None or status in ("", "same"):
            known = "the same, bit for bit" if status else "same by headers; c compares the values"
            return known if self.sides.two else ""
        cells = zip(HEADER[1:], diff_row(entry_diff)[1:], strict=True)
        lines = [f"{label:<10} {text}" for label, text in cells if text != "-"]
        return "\n".join([*lines, *([printable(entry_diff.detail)] if entry_diff.detail else [])])

    def _warn(self, error: Exception) -> None:
        self.notify(printable(str(error)), severity="warning", markup=False)

    def _say(self, text: str) -> None:
        message = self.query_one("#message", Static)
        message.update(Text(text))
        message.display = bool(text)

    @work(thread=True, exclusive=True, group="details")
    def _report(self) -> None:
        """Say of each side what `inspect` says."""
        worker = get_current_worker()
        for number, side in enumerate(self.panes):
            text = self.sides.report(number)
            if not worker.is_cancelled:
                self.call_later(side.say, text)

    @work(thread=True, exclusive=True, group="details")
    def _read(self, name: str, part: str | None) -> None:
        """Read values of an entry of each side, and show them unless the cursor went on."""
        worker = get_current_worker()
        sleep(_PAUSE)
        for number, entry in enumerate(self.sides.entries(name)):
            if worker.is_cancelled or entry is None:
                continue
            try:
                values = self.sides.values(entry, number, part)
            except (CkptError, OSError) as error:
                values = "\n".join(map(printable, str(error).splitlines()))
            if not worker.is_cancelled:
                self.call_later(self.panes[number].show_values, values)

    # ------------------------------------------------------------------------------------- the keys

    def action_arrange(self, arrangement: Arrangement) -> None:
        """Arrange the tree by section, name or file."""
        self._arrangement = arrangement
        self.arrange()

    def action_differing(self) -> None:
        """Show only what differs, or all again."""
        self._differing = not self._differing
        self.arrange()

    def action_ask(self, what: str) -> None:
        """Show the line in which a search or a slice is written."""
        node = self.tree_widget.cursor_node
        if what == "slice" and (node is None or node.allow_expand):
            self.notify("Choose a tensor first: a slice is of its values.")
            return
        line = self.query_one(f"#{what}", Input)
        line.display = True
        line.focus()

    def action_leave(self) -> None:
        """Leave the line; from the tree, end the search."""
        if self.focused is self.tree_widget and self._text:
            self.query_one("#search", Input).value = ""
        self._hide_lines()

    def _hide_lines(self) -> None:
        for line in self.query(Input):
            line.display = False
        self.tree_widget.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search while somebody writes."""
        if event.input.id == "search" and event.value != self._text:
            self._text = event.value
            self.arrange()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go back to the tree with what was written."""
        node = self.tree_widget.cursor_node
        if event.input.id == "slice" and node is not None and node.data is not None:
            self._read(node.data.below[0].name, event.value or None)
        self._hide_lines()

    def action_compare(self) -> None:
        """Compare the values below the cursor."""
        node = self.tree_widget.cursor_node
        if node is not None and node.data is not None:
            self._compare({leaf.name for leaf in node.data.below})

    @work(thread=True, exclusive=True, group="compare")
    def _compare(self, names: set[str]) -> None:
        worker = get_current_worker()
        total, done, shown = max(self.sides.nbytes(names), 1), 0, -1

        def on_bytes(nbytes: int) -> None:
            nonlocal done, shown
            if worker.is_cancelled:
                raise _Stopped
            done += nbytes
            if 100 * done // total > shown:
                shown = 100 * done // total
                self.call_later(self._say, f"comparing {format_size(total)}: {shown} % is read")

        try:
            self.sides.compare(names, on_bytes)
        except _Stopped:
            return
        except (CkptError, OSError) as error:
            self.call_later(self._warn, error)
        self.call_later(self._show_compared)

    def _show_compared(self) -> None:
        """Render all lines again, and the details of the one under the cursor."""
        tree = self.tree_widget
        tree.again()
        if tree.cursor_node is not None:
            self._show_details(tree.cursor_node)
