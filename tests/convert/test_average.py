"""Averages of checkpoints of one model: as torch has them in float64, whatever the meshes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import ran, run
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import formats
from ckpt_tools.convert.average import Weighting, average_of
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying import cast
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.core.names import NamePatterns
from ckpt_tools.distributed.run import write_here
from ckpt_tools.errors import UnsupportedError, UsageError, WriteError

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
# Of one model: HSDP in DCP, TP over FSDP in DCP, files of ranks.
MESHES = ("fsdp2_dcp_hsdp_2x4", "fsdp2_tp_dcp_2x2", "fsdp2_torchsave_1d_4r")
SOURCES = [str(REAL / name / "ckpt") for name in MESHES]

Tensors = dict[str, torch.Tensor]


def _mean(*xs: torch.Tensor) -> torch.Tensor:
    return (xs[0] + xs[1] + xs[2]) / 3


def _weighted(*xs: torch.Tensor) -> torch.Tensor:
    return (1 * xs[0] + 2.5 * xs[1] + 0 * xs[2]) / 3.5


def _moving(*xs: torch.Tensor) -> torch.Tensor:
    return 0.9 * (0.9 * xs[0] + (1 - 0.9) * xs[1]) + (1 - 0.9) * xs[2]


def _truth(name: str) -> Tensors:
    held = load_file(REAL / name / "truth.safetensors")
    return {fqn.removeprefix("model."): value for fqn, value in held.items() if "optim" not in fqn}


def _written(folder: Path) -> Tensors:
    checkpoint = ckpt_tools.open_checkpoint(folder)
    return {fqn.removeprefix("model."): tensor.torch() for fqn, tensor in checkpoint.items()}


@pytest.mark.parametrize(
    ("weighting", "formula"),
    [
        (Weighting(), _mean),
        (Weighting(weights=(1, 2.5, 0)), _weighted),
        (Weighting(ema=0.9), _moving),
    ],
)
@pytest.mark.parametrize("to_mesh", [None, "2x2"])
def test_it_is_what_torch_has_in_float64_cast_once(
    weighting: Weighting, formula: Callable[..., torch.Tensor], to_mesh: str | None, tmp_path: Path
) -> None:
    mesh = None if to_mesh is None else parse_mesh(to_mesh)
    indexes = [*map(formats.read_index, SOURCES)]
    write = WriteOptions(check=True)
    write_here(average_of(indexes, str(tmp_path / "out"), write, weighting, mesh, NamePatterns()))
    truths, written = [*map(_truth, MESHES)], _written(tmp_path / "out")
    assert written.keys() == truths[0].keys()
    for fqn, value in written.items():
        xs = [truth[fqn] for truth in truths]
        floating = value.dtype.is_floating_point
        wanted = formula(*(x.double() for x in xs)).to(value.dtype) if floating else xs[-1]
        assert torch.equal(value, wanted), fqn


def _saved(tmp_path: Path, *every: Tensors) -> list[str]:
    paths = [tmp_path / f"{number}.safetensors" for number in range(len(every))]
    for path, tensors in zip(paths, every, strict=True):
        save_file(tensors, path)
    return [*map(str, paths)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_each_type_is_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    xs = [torch.randn(5, 1000, dtype=wide).to(dtype) for _ in range(3)]
    paths = _saved(tmp_path, *({"w": x} for x in xs))
    ckpt_tools.average(paths, tmp_path / "out.safetensors", check=True)
    wanted = (xs[0].to(wide) + xs[1].to(wide) + xs[2].to(wide)) / 3
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], wanted.to(dtype))


def test_both_parts_of_a_complex_number_are_averaged_alone(tmp_path: Path) -> None:
    x = torch.complex(torch.tensor([-0.0, 1, 2]), torch.tensor([-1, float("inf"), float("nan")]))
    paths = _saved(tmp_path, {"w": x}, {"w": x})
    ckpt_tools.average(paths, tmp_path / "out.safetensors", check=True)
    written = load_file(tmp_path / "out.safetensors")["w"]
    assert torch.view_as_real(written).numpy().tobytes() == torch.view_as_real(x).numpy().tobytes()


def test_integers_come_from_the_last_and_a_note_names_those_that_differ(tmp_path: Path) -> None:
    held = [{"w": torch.ones(2), "ids": torch.arange(3), "n": torch.tensor(n)} for n in (1, 2)]
    result = ran("average", *_saved(tmp_path, *held), "-o", tmp_path / "out")
    assert "Takes 2 tensors of integers or bools from the last one" in result.stderr
    assert "they differ in n." in result.stderr
    assert int(_written(tmp_path / "out")["n"]) == 2


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"u": torch.ones(2)}, r"u \(float32 \[2\] and nothing\)"),
        ({"v": torch.ones(1, 2)}, r"v \(float32 \[1, 2\] and float32 \[2\]\)"),
        ({"v": torch.ones(2).bfloat16()}, r"v \(bfloat16 \[2\] and float32 \[2\]\)"),
        ({"n": torch.arange(2, dtype=torch.int32)}, r"n \(int32 \[2\] and int64 \[2\]\)"),
        ({"v": torch.ones(2).to(torch.float8_e4m3fn)}, "1 tensor of quantized weights"),
    ],
)
def test_what_is_not_of_one_model_is_refused_but_what_is_left_out(
    other: Tensors, said: str, tmp_path: Path
) -> None:
    last = {"w": torch.ones(4), "v": torch.ones(2), "n": torch.arange(2)}
    paths = _saved(tmp_path, last | other, last)
    with pytest.raises(UnsupportedError, match=said):
        ckpt_tools.average(paths, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    ckpt_tools.average(paths, tmp_path / "out", exclude="[uvn]")
    assert [*_written(tmp_path / "out")] == ["w"]


def test_it_is_no_job_of_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "2")
    done = run("average", *SOURCES, "-o", tmp_path / "out")
    assert (done.exit_code, "run it as one process" in done.stderr) == (2, True)


@pytest.mark.parametrize("weights", [(1, 2), (1, -1, 1), (0, 0, 0), (1, 1, float("nan"))])
def test_weights_are_one_each_none_below_0_and_not_all_0(
    weights: tuple[float, ...], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="weights"):
        ckpt_tools.average(SOURCES, tmp_path / "out", weights=weights)


def test_the_last_steps_of_a_run(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        (tmp_path / "run").mkdir(exist_ok=True)
        save_file({"w": torch.tensor(float(step))}, tmp_path / "run" / f"step-{step}.safetensors")
    ran("average", tmp_path / "run", "--last", "2", "-o", tmp_path / "out")
    assert float(_written(tmp_path / "out")["w"]) == 55
    assert run("average", tmp_path / "run", "--last", "4", "-o", tmp_path / "no").exit_code == 1
    assert run("average", tmp_path / "run", "-o", tmp_path / "no").exit_code == 2


def test_check_finds_an_average_that_was_computed_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = cast.write_mean
    wrong = lambda raws, one, *rest: right(raws, one._replace(divisor=4.0), *rest)  # noqa: E731
    monkeypatch.setattr(cast, "write_mean", wrong)
    with pytest.raises(WriteError, match="12 of 13 tensors"):
        ckpt_tools.average(SOURCES, tmp_path / "out", check=True)
    assert not (tmp_path / "out").exists()


def test_resume_goes_on_with_finished_files_and_refuses_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = cast.write_mean, iter(range(100))

    def stop_later(*given: object) -> None:
        if next(calls) == 20:
            raise KeyboardInterrupt
        right(*given)  # type: ignore[arg-type]

    words = ("average", *SOURCES, "--to-mesh", "4", "--threads", "1")
    ran(*words, "-o", tmp_path / "whole")
    monkeypatch.setattr(cast, "write_mean", stop_later)
    assert run(*words, "-o", tmp_path / "out").exit_code == 130
    other = run(*words, "-o", tmp_path / "out", "--resume", "--ema", "0.5")
    assert "ema was not given and is 0.5" in other.stderr
    result = ran(*words, "-o", tmp_path / "out", "--resume")
    assert "were already finished" in result.stderr
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
