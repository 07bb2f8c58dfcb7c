"""Checkpoints that are either complete or not there, whatever kills the process that writes them.

A run folder holds `checkpoints/step-00000500/` and so on: safetensors, `state.json` and, written last, `manifest.json`
with size and SHA-256 of each. `checkpoints/latest` and `checkpoints/best` hold the name of a step. Names ending in
`.tmp` are unfinished, or being deleted; `step-N.old` is a step being replaced, and counts as step N until that is done.

A manifest is trusted only as far as it fits the files and itself. Where several ranks hold shards of the tensors, each
of them writes a file: that of rank r of n is `model.r-of-n.safetensors`. A tensor is its shards concatenated, so any
number of ranks can read what any other number wrote; a scalar is the same in every shard. docs/scaling.md says why
torch.distributed.checkpoint is not used.
"""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import rectiformer
from rectiformer import files
from rectiformer.distributed.ranks import SINGLE_PROCESS, Ranks
from rectiformer.errors import ArgumentError, CheckpointError, DivergedError, RectiformerError

FORMAT = 1
STATE, MANIFEST = "state.json", "manifest.json"
MANIFEST_LIMIT = 2**24  # bytes; one of ours has about a thousand, and 500 more for each rank that saved a shard
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a file in the folder itself, never a way out of it
SHARD = re.compile(r"(.+)\.([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")
RowRange = Callable[[str], tuple[int, int]]
"""The first row wanted of a tensor, by its name, and the first one no longer wanted."""
STEP_NAME = re.compile(r"step-([0-9]{8,18})(\.old)?")
READS = 10
"""Most reads of a checkpoint while a training replaces it; one in a hundred meets a deletion if it saves every step."""
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A complete step. Every read is checked against the manifest again before it is parsed."""

    path: Path
    step: int
    manifest: dict[str, Any]

    def tensors(self, name: str, row_range: RowRange | None = None) -> dict[str, Tensor]:
        """The tensors saved under `name`, by one rank or many, on the CPU; all rows, or those in `row_range`."""
        names = files_of(name, self.manifest["files"], self.path / MANIFEST) or [f"{name}.safetensors"]
        return join_shards(map(self._load, names), row_range)

    def holds(self, name: str) -> bool:
        """Whether tensors were saved under `name`."""
        return bool(files_of(name, self.manifest["files"], self.path / MANIFEST))

    def _load(self, file: str) -> dict[str, Tensor]:
        from safetensors.torch import load  # here, so that `observe` needs torch and numpy alone

        data = self.read(file)
        try:
            return load(data)
        except Exception as error:  # the parser raises half a dozen classes, down to KeyError
            raise files.damaged(self.path / file, f"it is not safetensors ({error!r})") from error

    def state(self) -> dict[str, Any]:
        """What was saved along with the tensors."""
        return files.parse_object(self.path / STATE, self.read(STATE))

    def read(self, name: str) -> bytes:
        """One file, if the manifest lists it and its size and hash are as listed."""
        entry = self.manifest["files"].get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} holds no {name}; it has {', '.join(self.manifest['files'])}")
        data = files.read_regular(self.path / name, entry["size"])
        if (found := file_entry(data)) != entry:
            size, digest = entry["size"], entry["sha256"][:12]
            why = f"it has {len(data):,} bytes of hash {found['sha256'][:12]}, its manifest says {size:,} of {digest}"
            raise files.damaged(self.path / name, why)
        return data


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    identity: Mapping[str, str],
    *,
    best: bool = False,
    keep: int = 2,
    keep_also: Collection[int] = (),
    ranks: Ranks = SINGLE_PROCESS,
    shards: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Checkpoint:
    """Write step `step` of run `folder` to disk, then point `latest` (and `best`) to it, then prune.

    Until the new step is complete nothing else is touched. Saving a step again replaces it. Kept afterwards are this
    step and those before it, `keep` (at least 2) in all, the best and `keep_also`. Later steps, left behind by a run
    that went back, are removed: they would otherwise be taken for the newest. Numbers that are not finite are refused
    with DivergedError, a disk too small with NoSpaceError; either way earlier checkpoints are kept.

    Args:
        tensors: name -> tensors, each name a file. Tensors may not share storage: save one of those that are tied.
        state: anything JSON can hold.
        identity: hashes of what the weights belong to.
        ranks: the ranks that save it together, all of which call this. Rank 0 writes all but the `shards`.
        shards: name -> this rank's shards of tensors.
    """
    root = folder / "checkpoints"
    path, temporary = root / step_name(step), root / f"{step_name(step)}.tmp"
    contents: dict[str, bytes] = {}

    def pack_all() -> int:
        if ranks.is_rank0:
            contents.update({f"{name}.safetensors": pack(step, name, group) for name, group in tensors.items()})
        for name, group in (shards or {}).items():
            contents[shard_name(name, ranks.rank, ranks.world_size)] = pack(step, name, group)
        if ranks.is_rank0:  # an infinite float is no JSON, but is read back as it was
            contents[STATE] = json.dumps(state, indent=1).encode()
        return sum(map(len, contents.values()))

    size = sum(ranks.all_gather_object(pack_all))
    try:
        ranks.on_rank0(lambda: begin_step(path, temporary, size))
        entries = ranks.all_gather_object(lambda: write_contents(path, temporary, contents))
        manifest = {
            "format": FORMAT,
            "step": step,
            "files": {name: entry for each in entries for name, entry in each.items()},
            "identity": dict(identity),
            "rectiformer": rectiformer.__version__,
            "torch": str(torch.__version__),
        }
        ranks.on_rank0(lambda: finish_step(temporary, path, manifest, best, keep, keep_also))
    except RectiformerError:
        if ranks.is_rank0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Checkpoint(path, step, manifest)


def begin_step(path: Path, temporary: Path, size: int) -> None:
    """Make an empty folder `temporary` for the step `path` of `size` bytes."""
    root = path.parent
    with files.writing(path):
        if not root.is_dir():
            root.mkdir(parents=True)
            files.sync(root.parent)
        files.require_space(path, size)
        files.remove(temporary)
        temporary.mkdir()


def write_contents(path: Path, temporary: Path, contents: Mapping[str, bytes]) -> dict[str, Any]:
    """Write files of the step `path` to disk; returns their entries in its manifest."""
    with files.writing(path):
        for name, data in contents.items():
            files.write_file(temporary / name, data, halfway="mid-tensor")
    return {name: file_entry(data) for name, data in contents.items()}


def finish_step(
    temporary: Path, path: Path, manifest: Mapping[str, Any], best: bool, keep: int, keep_also: Collection[int]
) -> None:
    """Complete a step whose other files are written, and give it its name."""
    with files.writing(path):
        files.failpoint("before-manifest")
        files.write_file(temporary / MANIFEST, seal(manifest))
        files.sync(temporary)
        files.failpoint("before-rename")
        files.put_in_place(temporary, path)
        files.failpoint("before-latest")
        point_to(path, best)
        prune(path.parent, manifest["step"], keep, keep_also)


def point_to(path: Path, best: bool) -> None:
    """Have `latest`, and where it is the best `best`, name the step at `path`."""
    for pointer in ("latest", "best") if best else ("latest",):
        files.replace_file(path.with_name(pointer), f"{path.stem}\n".encode())


def prune(root: Path, step: int, keep: int, keep_also: Collection[int]) -> None:
    try:
        best = best_step(root)
    except CheckpointError:
        return  # which one is best cannot be told, so none is deleted
    folders = step_folders(root)
    kept = sorted((other for other in folders if other <= step), reverse=True)[: max(keep, 2)]
    for other in sorted(folders.keys() - {best, *kept, *keep_also}):
        doomed = root / f"{step_name(other)}.tmp"
        files.remove(doomed)
        os.rename(folders[other], doomed)  # so that half a deletion never looks like a damaged step
        files.failpoint("mid-prune")
        files.remove(doomed)


def find_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest complete checkpoint, to resume from; None where there is none.

    Warns of each newer one that is damaged. Removes what a killed save left and says so; hence only for the process
    that holds the run's lock. Others use `newest_checkpoints`, which changes nothing.
    """
    root = folder / "checkpoints"
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.suffix == ".tmp" or (path.suffix == ".old" and path.with_suffix("").exists()):
            try:
                files.remove(path)
            except OSError as error:
                raise CheckpointError(f"cannot remove {path}, left by a killed save: {error.strerror}") from error
            warn(f"removed {path}, left by a killed save")
    return next(iter(newest_checkpoints(folder, 1, warn)), None)


def newest_checkpoints(folder: Path, count: int, warn: Callable[[str], None]) -> list[Checkpoint]:
    """Up to `count` complete checkpoints, newest first; warns of each damaged one passed over."""
    found: list[Checkpoint] = []
    passed_over: list[str] = []
    for _, path in sorted(step_folders(folder / "checkpoints").items(), reverse=True):
        if len(found) == count:
            break
        try:
            found.append(open_checkpoint(path))
        except CheckpointError as error:
            passed_over.append(str(error))
    taken = ", ".join(checkpoint.path.name for checkpoint in found) or "none, as no other is complete"
    for trouble in passed_over:
        warn(f"{trouble}; taken instead: {taken}")
    return found


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint that `best` names; None where nothing was named yet, CheckpointError where it is damaged."""
    return read_steadily(folder, lambda notice: find_best(folder), lambda text: None)


def find_best(folder: Path) -> Checkpoint | None:
    """The same, read once; it fails where a training prunes that checkpoint meanwhile."""
    root = folder / "checkpoints"
    step = best_step(root)
    return None if step is None else open_checkpoint(step_folders(root).get(step, root / step_name(step)))


def read_steadily(folder: Path, read: Callable[[Callable[[str], None]], T], notice: Callable[[str], None]) -> T:
    """What `read` returns for the run in `folder`, which a training may be replacing and pruning checkpoints of.

    A read that fails or gives notice of damage is repeated if the checkpoints have changed since it began: what it had
    found may be gone by now, and another be the best. Only the notices of the last read are passed on.
    """
    for _ in range(READS):
        before, notices, failure = list_checkpoints(folder), list[str](), None
        try:
            found = read(notices.append)
        except CheckpointError as error:
            failure = error
        if (failure is None and not notices) or list_checkpoints(folder) == before:
            break
    for text in notices:
        notice(text)
    if failure is not None:
        raise failure
    return found


def list_checkpoints(folder: Path) -> list[tuple[str, int, int]]:
    """A snapshot of the checkpoints of a run, and of what `best` and `latest` name, to compare with a later one."""
    found = []
    with suppress(OSError), os.scandir(folder / "checkpoints") as entries:  # none there yet, or no folder
        for entry in entries:
            with suppress(FileNotFoundError):  # gone since it was listed
                status = entry.stat(follow_symlinks=False)
                found.append((entry.name, status.st_ino, status.st_mtime_ns))
    return sorted(found)


def open_checkpoint(path: Path, verify: bool = True) -> Checkpoint:
    """The checkpoint in the folder `path`; CheckpointError where it is damaged.

    Its manifest is checked, and its other files too unless `verify` is off: then each is when it is read.
    """
    if path.is_symlink() or not path.is_dir():
        why = "a link" if path.is_symlink() else "not a folder"
        raise CheckpointError(f"{path} is no checkpoint: {why}; ask for best, latest, a step that was saved, or a path")
    manifest = read_manifest(path)
    match = STEP_NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest["step"]:
        raise files.damaged(path / MANIFEST, f"it is that of step {manifest['step']}")
    checkpoint = Checkpoint(path, manifest["step"], manifest)
    for name in manifest["files"] if verify else ():
        checkpoint.read(name)
    return checkpoint


def best_step(root: Path) -> int | None:
    path = root / "best"
    if not os.path.lexists(path):
        return None
    match = STEP_NAME.fullmatch(files.read_regular(path, 100).decode("ascii", "replace").removesuffix("\n"))
    if match is None:
        raise files.damaged(path, "it does not name a step; write the name of one into it, or delete it")
    return int(match[1])


def step_name(step: int) -> str:
    """The folder name of a step: `step-00000500`."""
    return f"step-{step:08d}"


def step_folders(root: Path) -> dict[int, Path]:
    """Step -> its folder; a step set aside counts only until its replacement is there."""
    folders: dict[int, Path] = {}
    for name in sorted(os.listdir(root)) if root.is_dir() else []:
        if match := STEP_NAME.fullmatch(name):
            folders.setdefault(int(match[1]), root / name)
    return folders


def file_entry(data: bytes) -> dict[str, Any]:
    """What a manifest says of a file with this content."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def seal(manifest: Mapping[str, Any]) -> bytes:
    """A manifest or record as bytes that hold their own hash, so that damage to it shows too."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1, sort_keys=True).encode()


def read_sealed(path: Path, limit: int, version: int) -> dict[str, Any]:
    """What was sealed into a file of at most `limit` bytes; CheckpointError where it is damaged or foreign."""
    data = files.read_regular(path, limit)
    sealed = files.parse_object(path, data)
    if sealed.get("format") != version:
        raise files.damaged(
            path, f"its format is {sealed.get('format')!r}, this version of rectiformer reads {version}"
        )
    sealed.pop("sha256", None)
    try:
        intact = seal(sealed) == data
    except RecursionError:
        intact = False
    if not intact:
        raise files.damaged(path, "it does not match its own hash")
    return sealed


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, without its own hash; CheckpointError where it is damaged or foreign."""
    manifest = read_sealed(folder / MANIFEST, MANIFEST_LIMIT, FORMAT)
    if not is_well_formed(manifest):
        raise files.damaged(folder / MANIFEST, "it is no list of files inside the folder, each with size and hash")
    return manifest


def is_well_formed(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is what `save_checkpoint` writes; its own hash does not say so, as anybody can compute it."""
    types = {"format": int, "step": int, "files": dict, "identity": dict, "rectiformer": str, "torch": str}
    return (
        types_of(manifest) == types
        and all(type(value) is str for value in manifest["identity"].values())
        and all(PLAIN_NAME.fullmatch(name) for name in manifest["files"])
        and all(
            type(entry) is dict and types_of(entry) == {"sha256": str, "size": int}
            for entry in manifest["files"].values()
        )
    )


def types_of(mapping: Mapping[str, Any]) -> dict[str, type]:
    return {key: type(value) for key, value in mapping.items()}


def pack(step: int, name: str, group: Mapping[str, Tensor]) -> bytes:
    """Tensors in safetensors format; DivergedError where one is not finite, ArgumentError where two share storage."""
    owners: dict[tuple[torch.device, int], str] = {}
    for key, tensor in group.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DivergedError(
                f"step {step}: {name} {key!r} holds numbers that are not finite; "
                "no checkpoint was written, earlier ones are kept"
            )
        if tensor.numel() and (owner := owners.setdefault((tensor.device, tensor.data_ptr()), key)) != key:
            raise ArgumentError(f"{name} {owner!r} and {key!r} share storage; save one of them")
    from safetensors.torch import save

    return save({key: tensor.detach().cpu().contiguous() for key, tensor in group.items()})


def shard_name(name: str, rank: int, world_size: int) -> str:
    """The file of one rank's shards."""
    return f"{name}.{rank}-of-{world_size}.safetensors"


def files_of(name: str, listed: Collection[str], where: Path) -> list[str]:
    """The files of those `listed` that hold `name`, shards by rank; none where nothing holds it."""
    if f"{name}.safetensors" in listed:
        return [f"{name}.safetensors"]
    found = [match for file in listed if (match := SHARD.fullmatch(file)) and match[1] == name]
    counts = {int(match[3]) for match in found}
    wanted = [shard_name(name, rank, count) for count in counts for rank in range(count)]
    if len(counts) > 1 or sorted(wanted) != sorted(match[0] for match in found):
        raise files.damaged(where, f"of the shards of {name} it lists {', '.join(sorted(match[0] for match in found))}")
    return wanted


def join_shards(shards: Iterable[dict[str, Tensor]], row_range: RowRange | None) -> dict[str, Tensor]:
    """Whole tensors out of their shards, or some rows of each; besides what is wanted, one shard at most is held."""
    found: dict[str, list[Tensor]] = {}
    passed: Counter[str] = Counter()
    for shard in shards:
        for key, tensor in shard.items():
            if tensor.dim() == 0:
                found[key] = [tensor]
                continue
            first, stop = row_range(key) if row_range is not None else (0, passed[key] + len(tensor))
            wanted = tensor[max(0, first - passed[key]) : max(0, stop - passed[key])]
            found.setdefault(key, []).append(wanted if row_range is None else wanted.clone())
            passed[key] += len(tensor)
    return {key: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for key, pieces in found.items()}
