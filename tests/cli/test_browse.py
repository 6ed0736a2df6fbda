"""browse: what stands in the tree and beside it, driven by textual's own pilot."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from ckpt_tools.cli import browse, cli
from ckpt_tools.formats import read_index
from ckpt_tools.proof.diff import Naming, diff_headers

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt"

Act = Callable[["Screen"], Awaitable[None]]


def test_without_textual_the_error_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(browse, "find_spec", lambda _: None)
    done = CliRunner().invoke(cli, ["browse", str(DCP)])
    assert done.exit_code == 2
    assert "pip install 'ckpt-tools[browse]'" in done.stderr


pytest.importorskip("textual")

from textual.pilot import Pilot  # noqa: E402
from textual.widgets import DataTable, Footer, Static  # noqa: E402
from textual.widgets.tree import TreeNode  # noqa: E402

from ckpt_tools.cli.browse.app import Browser, Shown  # noqa: E402
from ckpt_tools.cli.browse.sides import Sides  # noqa: E402


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

    async def go_to(self, *names: str) -> TreeNode[Shown]:
        """Open these parts one below the other, and put the cursor on the last."""
        node = self.app.tree_widget.root
        for name in names:
            node = next(child for child in node.children if str(child.label) == name)
            self.app.tree_widget.move_cursor(node)
            await self.settle()
            if node.allow_expand and not node.is_expanded:
                await self.press("enter")
        return node

    def below(self, node: TreeNode[Shown] | None = None) -> list[str]:
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

    def table(self, kind: str, side: int = 0) -> list[list[str]]:
        """The cells of a table of chunks or values."""
        shown = list(self.app.query(f".{kind}").results(DataTable))[side]
        return [list(map(str, shown.get_row_at(row))) for row in range(shown.row_count)]


def look(*paths: Path, act: Act, size: tuple[int, int] = (150, 40), clean: bool = False) -> None:
    """Run the application on these checkpoints."""

    async def run() -> None:
        app = Browser(Sides([read_index(str(path)) for path in paths], Naming(clean=clean)))
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
        assert "Compare" not in keys

    look(DCP, act=act)


def test_a_slice_has_the_values_that_show_has() -> None:
    said = CliRunner().invoke(
        cli, ["show", str(DCP), "model.emb.weight", "--slice", "2:9,1:4", "--json"]
    )
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
    said = CliRunner().invoke(cli, ["inspect", str(DCP), "--shards", "--json"])
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


def _two(folder: Path) -> tuple[Path, Path]:
    """Two checkpoints: one value, one shape and one name are different."""
    same = np.arange(12, dtype=np.float32).reshape(3, 4)
    other = same.copy()
    other[1, 2] = 9.5
    for name, value, shape, last in (("a", same, 5, "old"), ("b", other, 6, "new")):
        (folder / name).mkdir()
        tensors = {"layer.w": value, "layer.v": same, "emb": np.zeros(shape, np.float32)}
        save_file({**tensors, last: same}, folder / name / "model.safetensors")
    return folder / "a", folder / "b"


def test_two_checkpoints_say_at_each_part_what_diff_says(tmp_path: Path) -> None:
    a, b = _two(tmp_path)

    async def act(screen: Screen) -> None:
        model = await screen.go_to("model")
        lines = {str(child.label): screen.lines()[child.line] for child in model.children}
        assert lines["old"].endswith("only in A")
        assert lines["new"].endswith("only in B")
        assert lines["emb"].endswith("shape")
        assert "differ" not in lines["layer"]
        assert "3 of 5 differ" in screen.lines()[model.line]
        await screen.go_to("model", "layer", "w")
        assert "same by headers" in screen.text()
        headers = diff_headers(read_index(str(a)), read_index(str(b)), naming=Naming())
        assert sum(entry.status != "same" for entry in headers.entries) == 3

    look(a, b, act=act)


def test_values_are_compared_when_asked_and_shown_side_by_side(tmp_path: Path) -> None:
    a, b = _two(tmp_path)

    async def act(screen: Screen) -> None:
        await screen.go_to("model", "layer")
        await screen.press("c")
        layer = screen.app.tree_widget.cursor_node
        assert layer is not None
        assert "1 of 2 differ" in screen.lines()[layer.line]
        await screen.go_to("model", "layer", "w")
        assert "1 of 12" in screen.text()
        assert "[1, 2]" in screen.text()
        assert screen.table("values", 0)[1][3] == "6"
        assert screen.table("values", 1)[1][3] == "9.5"
        await screen.go_to("model", "layer", "v")
        assert "bit for bit" in screen.text()
        await screen.press("d")
        assert sum(" w " in line for line in screen.lines()) == 0
        assert "4 tensors" in screen.lines()[1]

    look(a, b, act=act)


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


def test_clean_names_put_an_export_beside_its_source(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["export", str(DCP), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0

    async def act(screen: Screen) -> None:
        model = await screen.go_to("model")
        await screen.press("c")
        assert screen.lines()[model.line].endswith("13 tensors  same")
        await screen.press("d")
        assert "model" not in screen.below()

    look(DCP, tmp_path / "out", act=act, clean=True)


def test_leaving_ends_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def forever(_: Sides, names: set[str], on_bytes: Callable[[int], None]) -> None:
        try:
            while True:
                on_bytes(0)
        finally:
            ended.extend(names)

    monkeypatch.setattr(Sides, "compare", forever)
    a, b = _two(tmp_path)

    async def run() -> None:
        app = Browser(Sides([read_index(str(a)), read_index(str(b))], Naming()))
        async with app.run_test() as pilot:
            await pilot.pause(0.1)
            await pilot.press("c", "q")

    asyncio.run(run())
    assert len(ended) == 5


def test_a_pipe_is_answered_with_the_commands_that_write_text() -> None:
    done = CliRunner().invoke(cli, ["browse", str(DCP)])
    assert done.exit_code == 2
    assert "ls --tree" in done.stderr
