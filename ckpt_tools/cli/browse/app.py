"""The screen of `browse`: a tree, and beside it what is known of the entry under the cursor."""

from __future__ import annotations

import re
import sys
from time import sleep
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Header, Input, Static, Tree
from textual.worker import get_current_worker

from ckpt_tools.cli import entries, show
from ckpt_tools.cli.browse.content import Arrangement, Content, kinds, summary
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
_INDENT = 2  # columns of a level
_NARROWEST = 12  # columns in which text is wrapped
_KEYS = (
    ("up, down, k, j", "move"),
    ("Enter", "open or close a part"),
    ("right, left", "open a part; go up to the part around it"),
    ("Tab", "to the values and chunks, and back"),
    ("/", "search: part of a name, a glob, or re:…; Escape ends it"),
    (":", "values of a slice of the tensor: 0:4,:8"),
    ("s, n, f", "group by section, by name, or by the files of ranks"),
    ("?", "these keys"),
    ("q", "quit"),
)


class _Shown(NamedTuple):
    """A line of the tree: what stands there, and the bytes of the largest of its siblings."""

    place: Node | Leaf
    most: int

    @property
    def below(self) -> list[Leaf]:
        """The leaf itself, or every leaf below."""
        return [self.place] if isinstance(self.place, Leaf) else list(self.place.walk())


class _Entries(Tree[_Shown]):
    """The tree; its keys are those of ncdu, too. What stands on a line is made when it is seen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Open"),
        Binding("right,l", "open", "Open", show=False),
        Binding("left,h", "cursor_parent", "Up", show=False),
        Binding("j", "cursor_down", "Down", show=False),
        Binding("k", "cursor_up", "Up", show=False),
    ]

    def __init__(self, label: str, content: Content) -> None:
        super().__init__(Text(label))
        self.guide_depth = _INDENT
        self._content = content
        self._behind: dict[int, Text] = {}  # what stands behind names, by their nodes

    def action_open(self) -> None:
        """Open the part under the cursor."""
        if self.cursor_node is not None and self.cursor_node.allow_expand:
            self.cursor_node.expand()

    def show(self, root: Node, count: int) -> None:
        """Show another tree, of ``count`` leaves; one of few leaves is opened."""
        self.clear()
        self._behind.clear()
        self.root.data = _Shown(root, root.nbytes)
        self._fill(self.root, every=count <= _OPENED_AT_ONCE)
        self.root.expand()
        self.cursor_line = 0

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[_Shown]) -> None:
        """Add what is below a part when it is first opened."""
        self._fill(event.node)

    def _fill(self, node: TreeNode[_Shown], *, every: bool = False) -> None:
        """Add the lines below a part, largest first; with ``every`` also those below them."""
        if node.children or node.data is None or isinstance(node.data.place, Leaf):
            return
        leaves = node.data.place.leaves
        below: list[tuple[str, Node | Leaf]] = [(leaf.entry.fqn, leaf) for leaf in leaves]
        for part, start in node.data.place.below.items():
            name, branch = (part, start) if node.is_root else joined(part, start)
            is_leaf = not branch.below and len(branch.leaves) == 1
            below.append((name, branch.leaves[0] if is_leaf else branch))
        most = max((place.nbytes for _, place in below), default=0)
        for name, place in sorted(below, key=lambda item: (-item[1].nbytes, item[0])):
            if isinstance(place, Leaf):
                node.add_leaf(Text(printable(name)), _Shown(place, most))
                continue
            child = node.add(Text(printable(name)), _Shown(place, most))
            if every:
                self._fill(child, every=True)
                child.expand()

    def get_label_width(self, node: TreeNode[_Shown]) -> int:
        """About the width of a line, without making it."""
        return len(node.label) + _LABEL

    def render_label(self, node: TreeNode[_Shown], base_style: Style, style: Style) -> Text:
        """A line: size, bar, name, type and shape or sums, and what is damaged."""
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

    def _said(self, shown: _Shown) -> Text:
        """What stands behind a name: type and shape, or how much is below; and what is damaged."""
        leaves = {leaf.entry.fqn: leaf.entry for leaf in shown.below}
        wrong = len(self._content.index.damaged & leaves.keys())
        if isinstance(shown.place, Leaf):
            entry = shown.place.entry
            cells = entries.row(entry, None)[1 : 3 if isinstance(entry, TensorEntry) else 2]
            behind, mark = "  ".join(["", *cells]), "  damaged"
        else:
            behind, mark = f"  {kinds(leaves.values())}", f"  {wrong:,} of {len(leaves):,} damaged"
        return Text.assemble((behind, "dim"), (mark if wrong else "", "bold red"))


class _Details(VerticalScroll):
    """What is known of the entry under the cursor: facts, chunks, values."""

    def __init__(self, content: Content) -> None:
        super().__init__(id="details")
        self._content = content
        self._said = ""

    def compose(self) -> ComposeResult:
        """The widgets, from top to bottom."""
        yield Static(classes="facts")
        yield Static(classes="text")
        yield DataTable(classes="values")
        yield DataTable(classes="chunks", cursor_type="row", zebra_stripes=True)

    def say(self, text: str) -> None:
        """Show only a text; it may have the colours of a terminal."""
        self._said = text
        self._wrap()
        self.scroll_home(animate=False)
        self.query_one(".text", Static).update("")
        for table in self.query(DataTable):
            table.clear(columns=True).display = False

    def on_resize(self) -> None:
        """Wrap the text anew."""
        self._wrap()

    def _wrap(self) -> None:
        width = self.size.width - 3  # of the padding, and of the bar that scrolls
        lines = Text.from_ansi(self._said).split("\n", allow_blank=True)
        wrapped = [part for line in lines for part in self._hanging(line, width)]
        self.query_one(".facts", Static).update(Text("\n").join(wrapped))

    def _hanging(self, line: Text, width: int) -> list[Text]:
        """A line wrapped below its last column, where there is room for that."""
        columns = [match.end() for match in re.finditer(r"(?<=\S)  +|^ +", line.plain)]
        start = max((at for at in columns if at + _NARROWEST <= width), default=0)
        parts = line[start:].wrap(self.app.console, max(width - start, _NARROWEST))
        before = [line[:start], *[Text(" " * start)] * len(parts)]
        return [first + part for first, part in zip(before, parts, strict=False)]

    def show(self, entry: Entry) -> None:
        """Show what headers say of an entry."""
        self.say(self._content.facts(entry))
        if isinstance(entry, TensorEntry):
            table = self.query_one(".chunks", DataTable)
            table.display = True
            table.add_columns(*show.CHUNK_HEADER)
            for row in show.chunk_rows(entry, self._content.index.root, _MOST_CHUNKS):
                table.add_row(*map(Text, row))

    def show_values(self, values: Corner | str) -> None:
        """Show a text, or a row for each index of all dimensions but the last."""
        text = values if isinstance(values, str) else f"{values.noun} of {values.box}"
        self.query_one(".text", Static).update(Text(text))
        table = self.query_one(".values", DataTable)
        table.clear(columns=True).display = not isinstance(values, str)
        if isinstance(values, str):
            return
        first, width = (values.box.offsets or (0,))[-1], (values.box.sizes or (1,))[-1]
        table.add_columns("", *map(str, range(first, first + width)))
        texts = list(map(show.value_text, values.values))
        above = [*zip(values.box.offsets, values.box.sizes, strict=True)][-2::-1]
        for start in range(0, len(texts), max(width, 1)):
            number, place = start // width, list[str]()  # in all dimensions but the last
            for offset, size in above:
                place.insert(0, str(offset + number % size))
                number //= size
            table.add_row(",".join(place), *texts[start : start + width])


class _Help(ModalScreen[None]):
    """The keys."""

    CSS = """
    _Help { align: center middle; }
    _Help Static { width: auto; height: auto; border: round $primary; padding: 0 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,question_mark,q", "dismiss", "Close")
    ]

    def compose(self) -> ComposeResult:
        """A line for each key."""
        width = max(len(key) for key, _ in _KEYS)
        lines = [Text.assemble((f"{key:<{width}}", "bold"), f"  {what}") for key, what in _KEYS]
        yield Static(Text("\n").join(lines))


class Browser(App[None]):
    """The application: `content` is what it walks through."""

    TITLE = "ckpt-tools browse"
    CSS = """
    * { scrollbar-size: 1 1; }
    _Entries { width: 1fr; min-width: 40; scrollbar-size-horizontal: 0; }
    #details { width: 1fr; border-left: solid $primary; }
    .-narrow #main { layout: vertical; }
    .-narrow _Entries { width: 100%; height: 2fr; }
    .-narrow #details { width: 100%; height: 1fr; min-height: 7; border-left: none; }
    .facts, .text { height: auto; padding: 0 1; }
    DataTable { height: auto; max-height: 24; margin: 1 0 0 1; }
    #asked Input { display: none; }
    #asked { height: auto; }
    """
    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012 (textual's own annotation)
        (0, "-narrow"),
        (130, "-wide"),
    ]
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "ask('search')", "Search", key_display="/"),
        Binding("colon", "ask('slice')", "Slice", key_display=":"),
        Binding("s", "arrange('section')", "Sections"),
        Binding("n", "arrange('name')", "Names"),
        Binding("f", "arrange('file')", "Ranks"),
        Binding("escape", "leave", "Back", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, content: Content) -> None:
        super().__init__()
        self.content = content
        self._arrangement: Arrangement = "section"
        self._text = ""

    def compose(self) -> ComposeResult:
        """Header, tree and details, what is asked for, and the keys."""
        yield Header(icon=" ")
        with Horizontal(id="main"):
            yield _Entries("everything", self.content)
            yield _Details(self.content)
        with Vertical(id="asked"):
            yield Input(placeholder="part of a name, a glob, or re:…", id="search")
            yield Input(placeholder="slice of the values: 0:4,:8", id="slice")
        yield Footer()

    def on_mount(self) -> None:
        """Begin at the root."""
        parts = printable(self.content.index.root).rstrip("/").split("/")
        self.sub_title = "/".join(parts[-3:])  # the whole path stands in the details
        self.tree_widget.focus()
        self.arrange()

    @property
    def tree_widget(self) -> _Entries:
        """The tree."""
        return self.query_one(_Entries)

    @property
    def details(self) -> _Details:
        """What stands beside the tree, or below it."""
        return self.query_one(_Details)

    # ------------------------------------------------------------------------------------- the tree

    @work(thread=True, exclusive=True, group="tree")
    def arrange(self) -> None:
        """Build the tree again: in its arrangement, of what is searched for."""
        worker = get_current_worker()
        try:
            leaves = self.content.leaves(self._arrangement, self._text)
        except CkptError as error:
            said = printable(str(error))
            self.call_later(self.notify, said, severity="warning", markup=False)
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

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[_Shown]) -> None:
        """Show what the cursor is on."""
        self._show_details(event.node)

    def _show_details(self, node: TreeNode[_Shown]) -> None:
        self.query_one("#slice", Input).value = ""
        place = None if node.data is None else node.data.place
        if node.is_root:
            self._report()
        elif isinstance(place, Leaf):
            self.details.show(place.entry)
            self._read(place.entry, None)
        elif node.data is not None:
            self.details.say(summary(node.data.below))

    @work(thread=True, exclusive=True, group="details")
    def _report(self) -> None:
        """Say what `inspect` says."""
        worker = get_current_worker()
        text = self.content.report()
        if not worker.is_cancelled:
            self.call_later(self.details.say, text)

    @work(thread=True, exclusive=True, group="details")
    def _read(self, entry: Entry, part: str | None) -> None:
        """Read values of an entry, and show them unless the cursor went on."""
        worker = get_current_worker()
        sleep(_PAUSE)
        if worker.is_cancelled:
            return
        try:
            values = self.content.values(entry, part)
        except (CkptError, OSError) as error:
            values = "\n".join(map(printable, str(error).splitlines()))
        if not worker.is_cancelled:
            self.call_later(self.details.show_values, values)

    # ------------------------------------------------------------------------------------- the keys

    def action_arrange(self, arrangement: Arrangement) -> None:
        """Arrange the tree by section, name or file."""
        self._arrangement = arrangement
        self.arrange()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(_Help())

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
            self._read(node.data.below[0].entry, event.value or None)
        self._hide_lines()
