"""browse: what stands in the tree and beside it, driven by textual's own pilot."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from running import run
from safetensors.numpy import save_file

from ckpt_tools.cli import browse
from ckpt_tools.formats import read_index

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt"

Act = Callable[["Screen"], Awaitable[None]]


def test_without_textual_the_error_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(browse, "find_spec", lambda _: None)
    done = run("browse", DCP)
    assert done.exit_code == 2
    assert "pip install textual" in done.stderr


pytest.importorskip("textual")

from textual.pilot import Pilot  # noqa: E402
from textual.widgets import DataTable, Footer, Static  # noqa: E402
from textual.widgets.tree import TreeNode  # noqa: E402

from ckpt_tools.cli.browse.app import Browser, _Shown  # noqa: E402
from ckpt_tools.cli.browse.content import Content  # noqa: E402


class Screen:
    """The running application, and what can be read on it."""

    def __init__(self, app: Browser, pilot: Pilot[None]) -> None:
        self.app = app
        self._pilot = pilot

    async def settle(self) -> None:
        """Wait until nothing is read or drawn any more."""
        await self._pilot.pause()
        while not all(worker.is_finished for worker in self.app.workers):
            await self._pilot.pause(0.02)
        await self._pilot.pause()

    async def press(self, *keys: str) -> None:
        await self._pilot.press(*keys)
        await self.settle()

    async def search(self, text: str) -> None:
        await self.press("slash", *text, "enter")

    async def go_to(self, *names: str) -> TreeNode[_Shown]:
        """Open these parts one below the other, and put the cursor on the last."""
        node = self.app.tree_widget.root
        for name in names:
            node = next(child for child in node.children if str(child.label) == name)
            self.app.tree_widget.move_cursor(node)
            await self.settle()
            if node.allow_expand and not node.is_expanded:
                await self.press("enter")
        return node

    def below(self, node: TreeNode[_Shown] | None = None) -> list[str]:
        """The names of the lines below a node."""
        return [str(child.label) for child in (node or self.app.tree_widget.root).children]

    def lines(self) -> list[str]:
        """The lines of the whole tree, as they are drawn."""
        tree = self.app.tree_widget
        return [
            tree.render_label(tree.get_node_at_line(place), "", "").plain
            for place in range(tree.last_line + 1)
        ]

    def text(self) -> str:
        """All that stands beside the tree, without tables."""
        return "\n".join(
            str(static.render()) for static in self.app.query("#details Static").results(Static)
        )

    def table(self, kind: str) -> list[list[str]]:
        """The cells of a table of chunks or values."""
        shown = self.app.query_one(f".{kind}", DataTable)
        return [list(map(str, shown.get_row_at(row))) for row in range(shown.row_count)]


def look(path: Path, act: Act, size: tuple[int, int] = (150, 40)) -> None:
    """Run the application on this checkpoint."""

    async def run() -> None:
        app = Browser(Content(read_index(str(path))))
        async with app.run_test(size=size) as pilot:
            screen = Screen(app, pilot)
            await screen.settle()
            await act(screen)

    asyncio.run(run())


def test_the_largest_part_stands_first_and_the_root_says_what_inspect_says() -> None:
    async def act(screen: Screen) -> None:
        assert screen.below() == ["optim", "model", "other"]
        assert "complete by its headers, training can resume" in screen.text()
        assert screen.lines()[1].split()[:2] == ["19.4", "KB"]
        assert "██████████" in screen.lines()[1]
        assert "█░░░░░░░░░" in screen.lines()[2]

    look(DCP, act=act)


def test_the_keys_stand_in_the_last_line() -> None:
    async def act(screen: Screen) -> None:
        (footer,) = screen.app.query(Footer).results()
        keys = " ".join(str(key.render()) for key in footer.query("FooterKey").results())
        for word in ("Open", "/ Search", ": Slice", "Sections", "Names", "Ranks", "Quit"):
            assert word in keys

    look(DCP, act=act)


def test_a_question_mark_shows_the_keys() -> None:
    async def act(screen: Screen) -> None:
        await screen.press("question_mark")
        assert "search: part of a name" in str(screen.app.screen.query_one(Static).render())
        await screen.press("escape")
        await screen.press("down")
        assert "33 tensors, 13 objects" in screen.text()

    look(DCP, act=act)


def test_on_a_small_screen_the_tree_has_most_of_the_height_and_texts_wrap_in_their_column() -> None:
    async def act(screen: Screen) -> None:
        assert screen.app.tree_widget.size.height >= 13
        lines = [line.rstrip() for line in screen.text().splitlines()]
        assert "  mesh        2x4, inferred from the boxes that" in lines
        assert "              each rank saved" in lines

    look(DCP, act=act, size=(52, 24))


def test_a_slice_has_the_values_that_show_has() -> None:
    said = run("show", DCP, "model.emb.weight", "--slice", "2:9,1:4", "--json")
    expected = json.loads(said.stdout)["slice"]["values"]

    async def act(screen: Screen) -> None:
        await screen.go_to("model", "model", "emb.weight")
        assert [row[1] for row in screen.table("chunks")] == ["4", "5", "6", "7"]
        assert len(screen.table("values")) == 6
        await screen.press("colon", *"2:9,1:4", "enter")
        rows = screen.table("values")
        assert [row[0] for row in rows] == [str(place) for place in range(2, 9)]
        assert [[float(cell) for cell in row[1:]] for row in rows] == [
            pytest.approx(row, rel=1e-6) for row in expected
        ]
        await screen.press("colon", *"99:100", "enter")
        assert "is empty in" in screen.text()

    look(DCP, act=act)


def test_an_object_is_shown_with_its_value() -> None:
    async def act(screen: Screen) -> None:
        await screen.go_to("optim", "optim", "param_groups.0", "betas")
        assert "0.999" in screen.text()
        assert not any(table.display for table in screen.app.query(DataTable))

    look(DCP, act=act)


def test_by_ranks_each_file_has_the_bytes_that_it_holds() -> None:
    said = run("inspect", DCP, "--shards", "--json")
    loads = {Path(one["path"]).name: one["nbytes"] for one in json.loads(said.stdout)["shards"]}

    async def act(screen: Screen) -> None:
        await screen.press("f")
        assert len(screen.below()) == 8
        for child in screen.app.tree_widget.root.children:
            assert child.data is not None
            tensors = [leaf for leaf in child.data.below if hasattr(leaf.entry, "chunks")]
            assert sum(leaf.nbytes for leaf in tensors) == loads[str(child.label).split()[-1]]

    look(DCP, act=act)


def test_a_search_leaves_the_names_that_have_it_and_opens_them() -> None:
    async def act(screen: Screen) -> None:
        await screen.search("EMB.weight")
        assert sum("emb.weight" in line for line in screen.lines()) == 2
        assert any("exp_avg_sq" in line for line in screen.lines())
        await screen.press("escape")
        assert screen.below() == ["optim", "model", "other"]
        await screen.search("re:^step$")
        assert screen.below() == ["other"]

    look(DCP, act=act)


def test_ten_thousand_tensors_are_lines_only_once_they_are_opened(tmp_path: Path) -> None:
    tensors = {
        f"layers.{layer}.w{place}": np.zeros(2, np.float32)
        for layer in range(100)
        for place in range(100)
    }
    save_file(tensors, tmp_path / "model.safetensors")

    async def act(screen: Screen) -> None:
        (model,) = screen.app.tree_widget.root.children
        assert not model.children
        layers = await screen.go_to("model", "layers")
        assert len(layers.children) == 100
        assert not any(child.children for child in layers.children)
        await screen.search("w7")
        assert not any(child.children for child in screen.app.tree_widget.root.children)
        assert "1,100 tensors" in screen.lines()[1]

    look(tmp_path, act=act)


def test_what_is_not_whole_is_marked_and_the_rest_is_shown(tmp_path: Path) -> None:
    hurt = shutil.copytree(DCP, tmp_path / "hurt")
    (hurt / "__5_0.distcp").unlink()

    async def act(screen: Screen) -> None:
        assert "NOT COMPLETE" in screen.text()
        assert "__5_0.distcp" in screen.text()
        assert "damaged" in screen.lines()[1]
        await screen.go_to("model", "model", "emb.weight")
        assert "__5_0.distcp" in screen.text()

    look(hurt, act=act)


def test_a_narrow_terminal_has_the_details_below_the_tree() -> None:
    async def act(screen: Screen) -> None:
        tree, details = screen.app.tree_widget.region, screen.app.query_one("#details").region
        assert details.y >= tree.bottom
        assert tree.width == details.width == 80

    look(DCP, act=act, size=(80, 24))


def test_a_name_is_shown_as_it_is_spelled(tmp_path: Path) -> None:
    name = "a[bold]b[/bold]\x1b[31m"
    save_file({name: np.zeros(3, np.float32)}, tmp_path / "[red]x.safetensors")

    async def act(screen: Screen) -> None:
        await screen.go_to("model", "a[bold]b[/bold]\\x1b[31m")
        assert "a[bold]b[/bold]\\x1b[31m  float32  [3]" in screen.lines()[-1]
        assert screen.table("chunks")[0][2] == "[red]x.safetensors"
        await screen.press("colon", *"[red]", "enter")
        assert "'red' is not valid" in screen.text()

    look(tmp_path / "[red]x.safetensors", act=act)


def test_two_checkpoints_are_answered_with_diff() -> None:
    done = run("browse", DCP, DCP)
    assert done.exit_code == 2
    assert "CKPT is one path" in done.stderr
    assert "`ckpt-tools diff A B` compares two." in done.stderr


def test_a_pipe_is_answered_with_the_commands_that_write_text() -> None:
    done = run("browse", DCP)
    assert done.exit_code == 2
    assert "ls --tree" in done.stderr
