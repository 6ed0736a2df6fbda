"""Real torchrun jobs over gloo: the command, the engines, and training that goes on."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from damages import Victim
from dtensor_files import HYBRID, drifted, dtensor, mesh_of, shard
from launching import BIN, ckpt_tools, contents, job, torchrun
from reader_contract import truth_of
from safetensors.numpy import save_file

from ckpt_tools.copying.read import read_array
from ckpt_tools.core.geometry import Box
from ckpt_tools.formats import locate, read_index
from ckpt_tools.storage.reader import Files

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = DATA / "fsdp2_dcp_1d_4r" / "ckpt"
TORCH_2_6 = torch.__version__.startswith("2.6.")
TP = ("*.up.weight*=S(0),S(0)", "*.down.weight*=S(0),S(1)")


# ------------------------------------------------------------------------- training that goes on


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What each job did next: from the checkpoint that a job of 4 ranks left, and from ours."""
    if TORCH_2_6:
        pytest.skip("FSDP2 of torch 2.6 trains on no CPU")
    folder = tmp_path_factory.mktemp("training")
    job(4, "training.py", "save", folder)
    source = folder / "source"
    (folder / "dcp").rename(source)
    for name, arguments in {
        "1d": ("--to-mesh", "3"),
        "hsdp": ("--to-mesh", "2x2"),
        "tp": ("--to-mesh", "dp=2,tp=2", *(word for rule in TP for word in ("--place", rule))),
        "fsdp1": ("--to-mesh", "4"),
    }.items():
        ckpt_tools("reshard", source, "-o", folder / name, *arguments)
    kinds = ("hsdp", "tp", "fsdp1")
    tasks = [f"{kind}:{folder / name}" for kind in kinds for name in ("source", kind)]
    job(4, "training.py", "step", folder / "four.json", *tasks)
    job(3, "training.py", "step", folder / "three.json", f"1d:{source}", f"1d:{folder / '1d'}")
    found = json.loads((folder / "four.json").read_text())
    found |= json.loads((folder / "three.json").read_text())
    names = {
        f"{kind}:{folder / name}": (kind, name)
        for kind in (*kinds, "1d")
        for name in ("source", kind)
    }
    by_kind: dict[str, dict[str, str]] = {}
    for task, result in found.items():
        kind, name = names[task]
        by_kind[f"{kind} from {'source' if name == 'source' else 'ours'}"] = result
    return by_kind


@pytest.mark.parametrize("kind", ["1d", "hsdp", "tp", "fsdp1"])
def test_a_job_on_the_target_mesh_loads_what_the_source_holds(
    steps: dict[str, dict[str, str]], kind: str
) -> None:
    assert steps[f"{kind} from ours"]["loaded"] == steps[f"{kind} from source"]["loaded"]


@pytest.mark.parametrize("kind", ["1d", "hsdp", "tp", "fsdp1"])
def test_a_job_on_the_target_mesh_takes_the_same_next_step(
    steps: dict[str, dict[str, str]], kind: str
) -> None:
    assert steps[f"{kind} from ours"] == steps[f"{kind} from source"]


@pytest.mark.parametrize("more", [("--format", "ranks"), ("--layout", "verl")], ids=" ".join)
def test_torchs_own_full_tensor_and_copy_take_what_rank_files_hold(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    source = DATA / "torch-2.15.0-fsdp2_1d_4r"
    words = ("--to-mesh", "2", "--only", "model", "--device-type", "cpu")
    words += ("--torch-version", torch.__version__)
    ckpt_tools("reshard", source / "ckpt", "-o", tmp_path / "out", *words, *more)
    (first,) = (tmp_path / "out").rglob("model_world_size_2_rank_0.pt")
    files = str(first).replace("rank_0", "rank_{rank}")
    job(2, "load_ranks.py", files, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    truth = {name: true.data for name, true in truth_of(source).items() if "optim." not in name}
    assert {f"model.{fqn}": t.numpy().tobytes() for fqn, t in loaded.items()} == truth


# ------------------------------------------------------------------------------------------ casts


@pytest.mark.parametrize("way", ["here", "workers", "copy", "gather"])
def test_finite_values_that_a_cast_makes_infinite_are_noted(tmp_path: Path, way: str) -> None:
    full = {name: torch.ones(4, 2) for name in ("small", "first", "last", "infinite")}
    full["first"][0, 0], full["last"][3, 1] = 70_000, -70_000
    full["infinite"][0, 0] = torch.inf
    torch.save(full, tmp_path / "full.pt")
    ranks = ("--to-mesh", "2", "--format", "ranks", "--torch-version", torch.__version__)
    ckpt_tools("reshard", tmp_path / "full.pt", "-o", tmp_path / "ranks", *ranks)
    words = ["reshard", tmp_path / "ranks", "-o", tmp_path / "out", "--dtype", "fp16"]
    words += ["--to-mesh", "2", "--no-verify-source"]
    if way in ("here", "workers"):
        stderr = ckpt_tools(*words, *(["-j", "2"] if way == "workers" else [])).stderr
    else:
        stderr = torchrun(2, "-m", "ckpt_tools", *words, "--engine", way).stderr
    (note,) = [line for line in stderr.splitlines() if line.startswith("Finite")]
    assert note.startswith("Finite values of 2 tensors are too large for the new type")
    assert "infinite in it: first, last." in note


# ---------------------------------------------------------------------------- what is written over


@pytest.mark.parametrize("command", [("export",), ("reshard", "--to-mesh", "2")])
def test_the_ranks_of_a_job_write_into_no_source(tmp_path: Path, command: tuple[str, ...]) -> None:
    source = tmp_path / "run"
    shutil.copytree(DCP, source)
    (tmp_path / "link").symlink_to("run")
    before = contents(tmp_path)
    words = ("-m", "ckpt_tools", *command, source, "-o", tmp_path / "link" / "new", "--force")
    done = torchrun(2, *words)
    assert done.returncode != 0
    assert "lies inside the source" in done.stderr
    assert contents(tmp_path) == before


# --------------------------------------------------------------------------------------- engines


@pytest.fixture(scope="module", params=["default", "tiny"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of reshards by one job of 4 ranks, with the default sizes or with tiny ones:
    ENGINE-NAME, or ENGINE-NAME.error.RANK.
    """
    folder = tmp_path_factory.mktemp("engines")
    local = folder / "local"
    verl = DATA / "verl_fsdp2_4r"
    ranks = next(path.parent for path in verl.rglob("model_world_size_4_rank_0.pt"))
    for rank in range(4):
        (local / str(rank)).mkdir(parents=True)
        for file in ranks.glob(f"*_rank_{rank}.pt"):
            shutil.copy(file, local / str(rank))
    lacking = folder / "lacking"
    shutil.copytree(local, lacking)
    for file in (lacking / "2").iterdir():
        file.unlink()
    (folder / "hurt").mkdir()
    victim = Victim("ranks", folder / "hurt", random.Random(0))  # noqa: S311 - a test's own choice
    entry = max(victim.index().tensors, key=lambda entry: entry.nbytes)
    victim.flip(entry.chunks[2].data)
    hurt = victim.path
    torn = folder / "torn"
    shutil.copytree(DCP, torn)
    item = next(e for e in read_index(str(torn)).tensors if len(e.chunks) > 1).chunks[1].data
    with open(item.path, "r+b") as file:
        file.seek(item.offset)
        file.write(bytes(item.length))
    tp = ("*.fc1.*=S(0),S(0)", "*.fc2.weight*=S(0),S(1)")
    tasks = [
        {"engine": "dcp", "name": "hsdp", "ckpt": DCP, "mesh": "2x2"},
        {"engine": "dcp", "name": "uneven", "ckpt": DATA / "fsdp2_dcp_1d_8r" / "ckpt", "mesh": "4"},
        {
            "engine": "dcp",
            "name": "tp",
            "ckpt": DATA / "fsdp2_tp_dcp_2x2" / "ckpt",
            "mesh": "dp=2,tp=2",
            "place": tp,
        },
        {"engine": "dcp", "name": "ranks", "ckpt": ranks, "mesh": "4"},
        {"engine": "dcp", "name": "torn", "ckpt": torn, "mesh": "4"},
        {
            "engine": "gather",
            "name": "1d",
            "ckpt": DATA / "fsdp2_torchsave_1d_4r" / "ckpt",
            "mesh": "4x2",
        },
        {
            "engine": "gather",
            "name": "tp",
            "ckpt": DATA / "fsdp2_tp_torchsave_2x2" / "ckpt",
            "mesh": "3",
        },
        {
            "engine": "gather",
            "name": "dtypes",
            "ckpt": DATA / "dtensor_dtypes_torchsave_4r" / "ckpt",
            "mesh": "2",
        },
        {"engine": "gather", "name": "verl", "ckpt": local / "{rank}", "mesh": "8"},
        {
            "engine": "gather",
            "name": "checked",
            "ckpt": local / "{rank}",
            "mesh": "8",
            "check": True,
        },
        {"engine": "dcp", "name": "checked", "ckpt": DCP, "mesh": "2x2", "check": True},
        {"engine": "gather", "name": "drifted", "ckpt": drifted(folder / "drifted"), "mesh": "2"},
        {"engine": "gather", "name": "hurt", "ckpt": hurt, "mesh": "2", "check": True},
        {"engine": "copy", "name": "hurt", "ckpt": hurt, "mesh": "2", "check": True},
        {"engine": "copy", "name": "dcp", "ckpt": DCP, "mesh": "4x2"},
        {
            "engine": "copy",
            "name": "columns",
            "ckpt": ranks,
            "mesh": "3",
            "place": ("*_proj.weight*=S(1)",),
        },
        {"engine": "gather", "name": "lacking", "ckpt": lacking / "{rank}", "mesh": "8"},
    ]
    copied = {"verl": ranks}
    for task in tasks:
        name = task.pop("name")
        task["out"] = str(folder / f"{task['engine']}-{name}")
        if name not in ("lacking", "ranks", "checked", "drifted", "hurt", "torn"):
            places = [word for rule in task.get("place", ()) for word in ("--place", rule)]
            source = copied.get(str(name), task["ckpt"])
            out = folder / f"copy-{task['engine']}-{name}"
            ckpt_tools("reshard", source, "-o", out, "--to-mesh", task["mesh"], *places)
    (folder / "tasks.json").write_text(json.dumps(tasks, default=str))
    job(4, "engines.py", folder / "tasks.json", request.param)
    return folder


def elements(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a checkpoint: its type, shape and elements."""
    with Files() as files:
        index = locate(read_index(str(folder)), files)
        index.require_whole()
        return {
            entry.fqn: (
                entry.dtype.name,
                entry.shape,
                bytes(read_array(entry, Box.whole(entry.shape), files=files)),
            )
            for entry in index.tensors
        }


STRIDED = "torch 2.6 places uneven strided shards wrongly, which the engine refuses"
BY_DCP = ["hsdp", "uneven", pytest.param("tp", marks=pytest.mark.skipif(TORCH_2_6, reason=STRIDED))]


@pytest.mark.parametrize("name", BY_DCP)
def test_the_engine_dcp_gives_the_tensors_that_copy_gives(engines: Path, name: str) -> None:
    assert elements(engines / f"dcp-{name}") == elements(engines / f"copy-dcp-{name}")


@pytest.mark.parametrize("name", BY_DCP)
def test_the_engine_dcp_keeps_every_chunk_where_copy_puts_it(engines: Path, name: str) -> None:
    def places(folder: Path) -> dict[str, set[tuple[Box, int | None]]]:
        index = read_index(str(folder))
        return {e.fqn: {(chunk.box, chunk.rank) for chunk in e.chunks} for e in index.tensors}

    assert places(engines / f"dcp-{name}") == places(engines / f"copy-dcp-{name}")


@pytest.mark.parametrize("name", BY_DCP)
def test_the_engine_dcp_keeps_paths_and_the_bytes_of_objects(engines: Path, name: str) -> None:
    def objects(folder: Path) -> dict[str, tuple[object, bytes]]:
        with Files() as files:
            return {
                entry.fqn: (entry.path, files.read(*entry.data))
                for entry in read_index(str(folder)).objects
            }

    assert objects(engines / f"dcp-{name}") == objects(engines / f"copy-dcp-{name}")


def test_the_engine_dcp_saves_what_lightning_keeps_beside_its_files(tmp_path: Path) -> None:
    source = DATA / "lightning_fsdp_sharded_4r" / "ckpt"
    words = ("reshard", source, "--to-mesh", "2", "-o")
    torchrun(2, "-m", "ckpt_tools", *words, tmp_path / "dcp", "--engine", "dcp")
    ckpt_tools(*words, tmp_path / "copy")
    told = ckpt_tools("diff", tmp_path / "dcp", tmp_path / "copy")
    assert "All are the same" in told.stdout


def test_the_engine_dcp_refuses_what_torch_cannot_load_on_every_rank(engines: Path) -> None:
    told = {(engines / f"dcp-ranks.error.{rank}").read_text() for rank in range(4)}
    assert len(told) == 1
    assert told.pop().startswith("UnsupportedError: ")
    assert not (engines / "dcp-ranks").exists()


def test_the_engine_dcp_refuses_an_item_that_any_of_its_ranks_finds_damaged(engines: Path) -> None:
    told = {(engines / f"dcp-torn.error.{rank}").read_text() for rank in range(4)}
    assert len({re.sub(r"Rank \d: ", "", one) for one in told}) == 1
    assert "__1_0.distcp, item of " in told.pop()
    assert not (engines / "dcp-torn").exists()


@pytest.mark.parametrize("name", ["1d", "tp", "dtypes", "verl"])
def test_the_engine_gather_writes_the_files_that_copy_writes(engines: Path, name: str) -> None:
    refused = {path.read_text() for path in engines.glob(f"gather-{name}.error.*")}
    if refused and TORCH_2_6:
        assert len(refused) == 1
        assert re.search(r"torch 2\.6\S+ cannot gather it", refused.pop())
        assert not (engines / f"gather-{name}").exists()
        pytest.skip("torch 2.6 puts only even strided shards together")
    assert contents(engines / f"gather-{name}") == contents(engines / f"copy-gather-{name}")


@pytest.mark.parametrize("name", ["dcp", "columns"])
def test_the_engine_copy_writes_the_files_that_one_process_writes(engines: Path, name: str) -> None:
    assert contents(engines / f"copy-{name}") == contents(engines / f"copy-copy-{name}")


def test_the_engine_gather_refuses_large_replicas_that_differ(engines: Path) -> None:
    told = {(engines / f"gather-drifted.error.{rank}").read_text() for rank in range(4)}
    assert len(told) == 1
    assert "right: w [4:8, 0:100000] (ranks 1 and 3)." in told.pop()
    assert not list(engines.glob("gather-drifted.partial"))


@pytest.mark.parametrize("engine", ["copy", "gather"])
def test_no_engine_proves_the_copy_of_a_damaged_source(engines: Path, engine: str) -> None:
    told = {(engines / f"{engine}-hurt.error.{rank}").read_text() for rank in range(4)}
    assert len(told) == 1
    assert "what was read of it is damaged: " in told.pop()
    assert not list(engines.glob(f"{engine}-hurt*[!0-9]"))


def test_a_rank_without_its_file_ends_all_ranks_with_one_error(engines: Path) -> None:
    told = {(engines / f"gather-lacking.error.{rank}").read_text() for rank in range(4)}
    assert len(told) == 1
    assert "Rank 2: " in told.pop()
    assert not list(engines.glob("gather-lacking.partial"))


ON_EACH_RANK = {
    "alike": {"step": lambda _: torch.tensor(4), "lr": lambda _: 0.1},
    "buffers": {"buffer": lambda rank: torch.ones(3) + rank},
    "states": {"rng_state": lambda rank: torch.tensor(4 + rank)},
    "saves": {"step": lambda rank: 4 + rank},
    "steps": {"step": lambda rank: torch.tensor(4 + rank)},
    "objects": {"lr": lambda rank: 0.1 + rank},
    "types": {"buffer": lambda rank: torch.ones(3, dtype=[torch.half, torch.float][rank])},
    "positions": {"dataloader": lambda rank: {f"dp_rank_{rank}": {"position": 3 + rank}}},
    "unopened": {"random": lambda _: np.random.RandomState(0).get_state()},
}


def test_the_engine_gather_notes_and_refuses_what_copy_does(tmp_path: Path) -> None:
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    placed = [HYBRID[-1]]
    for name, values in ON_EACH_RANK.items():
        (tmp_path / name).mkdir()
        for rank in range(2):
            mesh = mesh_of((2,), rank)
            state = {"w": dtensor(shard(whole, placed, mesh), whole.shape, placed, mesh)}
            state |= {key: value(rank) for key, value in values.items()}
            torch.save(state, tmp_path / name / f"model_world_size_2_rank_{rank}.pt")
    for engine in ("copy", "gather"):
        tasks = [
            {
                "engine": engine,
                "ckpt": tmp_path / name,
                "mesh": "3",
                "out": tmp_path / engine / name,
            }
            for name in ON_EACH_RANK
        ]
        (tmp_path / engine).mkdir()
        (tmp_path / "tasks.json").write_text(json.dumps(tasks, default=str))
        job(2, "engines.py", tmp_path / "tasks.json")
    found = contents(tmp_path / "gather")
    assert found == contents(tmp_path / "copy")
    refused = {path.split(".")[0] for path in found if ".error." in path}
    assert refused == {"buffers", "saves", "steps", "types"}


@pytest.mark.parametrize("engine", ["dcp", "gather"])
def test_every_engine_keeps_what_check_proved_beside_the_shards(engines: Path, engine: str) -> None:
    told = json.loads((engines / f"{engine}-checked" / "ckpt_tools_proof.json").read_text())
    assert told["proof"].startswith("Proven by ")
    assert " bit for bit." in told["proof"]


@pytest.mark.parametrize(
    ("engine", "mesh", "ckpt"),
    [("dcp", "2x2", DCP), ("gather", "3", DATA / "fsdp2_torchsave_1d_4r" / "ckpt")],
)
def test_a_dry_run_of_an_engine_plans_what_copy_plans_and_prints_once(
    tmp_path: Path, engine: str, mesh: str, ckpt: Path
) -> None:
    words = ("reshard", ckpt, "-o", tmp_path / "out", "--to-mesh", mesh, "--dry-run", "--json")
    done = torchrun(4, "--no-python", "ckpt-tools", *words, "--engine", engine)
    assert done.returncode == 0, done.stderr
    planned, copied = json.loads(done.stdout), json.loads(ckpt_tools(*words).stdout)
    assert planned["engine"] == engine
    alike = ("files", "notes", "mesh", "written")
    assert [planned[key] for key in alike] == [copied[key] for key in alike]
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------- commands


def test_four_ranks_write_the_bytes_of_one_process_and_of_two_workers(tmp_path: Path) -> None:
    ckpt_tools("reshard", DCP, "-o", tmp_path / "one", "--to-mesh", "4x8")
    ckpt_tools("reshard", DCP, "-o", tmp_path / "workers", "--to-mesh", "4x8", "-j", "2")
    arguments = ("reshard", DCP, "-o", tmp_path / "ranks", "--to-mesh", "4x8")
    done = torchrun(4, "-m", "ckpt_tools", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("in 33 files") == 1
    assert done.stderr.count("4x8 = dp_replicate=4 × dp_shard=8") == 1
    alone = contents(tmp_path / "one")
    assert contents(tmp_path / "workers") == alone
    assert contents(tmp_path / "ranks") == alone


def test_ranks_and_workers_fill_the_files_of_an_export_together(tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    values = np.random.default_rng(0).integers(0, 255, (3, 1024, 20_000), dtype=np.uint8)
    save_file({f"w{number}": value for number, value in enumerate(values)}, source)
    arguments = ("export", source, "--max-shard-size", "45MB", "--check")
    ckpt_tools(*arguments, "-o", tmp_path / "one")
    ckpt_tools(*arguments, "-o", tmp_path / "workers", "-j", "3")
    done = torchrun(4, "-m", "ckpt_tools", *arguments, "-o", tmp_path / "ranks")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensors, ") == 1
    alone = contents(tmp_path / "one")
    assert len(alone) == 3
    assert contents(tmp_path / "workers") == alone
    assert contents(tmp_path / "ranks") == alone


def test_ranks_merge_adapters_into_what_each_of_them_writes(tmp_path: Path) -> None:
    peft = DATA / "peft_fsdp2_dcp_4r" / "ckpt"
    arguments = ("export", peft, "--merge-lora", "--lora-alpha", "6")
    ckpt_tools(*arguments, "-o", tmp_path / "one.safetensors")
    ckpt_tools(*arguments, "-o", tmp_path / "workers.safetensors", "-j", "2")
    done = torchrun(2, "-m", "ckpt_tools", *arguments, "-o", tmp_path / "ranks.safetensors")
    assert done.returncode == 0, done.stderr
    alone = (tmp_path / "one.safetensors").read_bytes()
    assert (tmp_path / "workers.safetensors").read_bytes() == alone
    assert (tmp_path / "ranks.safetensors").read_bytes() == alone


def test_what_an_export_by_ranks_refuses_is_told_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("export", DCP, "-o", out, "--include", "nothing*")
    done = torchrun(2, "-m", "ckpt_tools", *arguments)
    assert done.returncode != 0
    assert done.stderr.count("filters choose no entry") == 1
    assert "exitcode  : 1" in done.stderr
    assert not list(tmp_path.iterdir())
    done = torchrun(2, "-m", "ckpt_tools", "export", DCP, "-o", "s3://bucket/out")
    assert done.stderr.count("is an address, and the ranks of a job write to") == 1
    assert "exitcode  : 2" in done.stderr


@pytest.mark.parametrize("command", ["export {} -o {}", "reshard {} -o {} --to-mesh 2"])
def test_two_sources_of_one_layout_are_not_mixed(tmp_path: Path, command: str) -> None:
    for rank in (0, 1):
        values = np.full((1024, 500), rank, dtype=np.uint8)
        save_file({"a": values, "b": values}, tmp_path / f"source{rank}.safetensors")
    asked = command.format(f"{tmp_path}/source$RANK.safetensors", tmp_path / "out")
    done = torchrun(2, "--no-python", "sh", "-c", f"exec ckpt-tools {asked}")
    assert done.returncode != 0
    assert done.stderr.count("sees another checkpoint than rank 0") == 1
    assert "exitcode  : 3" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "source0.safetensors",
        "source1.safetensors",
    ]


def test_torchrun_finds_the_command_itself_and_a_looking_one_prints_once() -> None:
    alone = ckpt_tools("ls", DCP).stdout
    done = torchrun(2, "ckpt-tools", "ls", DCP, env={"PET_NO_PYTHON": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone


def test_torchrun_runs_the_command_by_its_path_and_needs_no_variable(tmp_path: Path) -> None:
    arguments = ("reshard", DCP, "--to-mesh", "2")
    ckpt_tools(*arguments, "-o", tmp_path / "one")
    done = torchrun(2, BIN / "ckpt-tools", *arguments, "-o", tmp_path / "ranks")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("in 3 files") == 1
    assert done.stdout.endswith(" by 2 ranks\n")
    assert contents(tmp_path / "ranks") == contents(tmp_path / "one")


def test_a_guessed_command_under_torchrun_prints_once() -> None:
    done = torchrun(2, BIN / "ckpt-tools", "list", DCP)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ckpt_tools("ls", DCP).stdout


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_world_that_does_not_fit_is_one_error_that_says_which_would(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    arguments = ("reshard", DCP, "-o", out, "--to-mesh", "4", "--engine", "dcp", *more)
    done = torchrun(2, "--no-python", "ckpt-tools", *arguments)
    assert done.returncode != 0
    assert done.stderr.count("Error: --engine dcp needs one rank") == 1
    assert "torchrun --nproc-per-node 4" in done.stderr
    assert "exitcode  : 2" in done.stderr
    assert not list(tmp_path.iterdir())
