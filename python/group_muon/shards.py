"""Steps of weights that lie in shards on several processes (DTensor): under FSDP2, tensor parallelism, or both.

Momentum is elementwise, so each process keeps that of its shards. A piece is a set of heads (or a matrix) that no group
ever crosses. Where one process holds all of a piece, it steps it alone. The others are orthogonalized by an owner: their
directions go to it by one all-to-all, and the results come back by another."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from group_muon import adamw
from group_muon.dtensors import is_sharded, local

_ops = torch.ops.group_muon

# Runs of indices: the first and the number of each.
_Runs = tuple[tuple[int, int], ...]
# What a process holds of a weight read as matrices × rows × columns.
_Box = tuple[_Runs, _Runs, _Runs]
# Indices into a tensor of three dimensions: a slice or a list for each.
_Cut = tuple[slice | Tensor, slice | Tensor, slice | Tensor]
# Arguments of step_ for one weight (optimizer.py).
_Weight = tuple[Tensor, Tensor, Tensor, str, str, str, int, float, float, float, str]


# Where the elements of a shard are.


def _chunk(count: int, chunks: int, index: int) -> tuple[int, int]:
    """Begin and end of a chunk, as torch.chunk cuts them; the last may be empty."""
    size = -(-count // chunks)
    return min(index * size, count), min((index + 1) * size, count)


def _between(runs: _Runs, begin: int, end: int) -> _Runs:
    """The positions begin … end-1 of the runs."""
    found, before = [], 0
    for first, count in runs:
        low, high = max(begin - before, 0), min(end - before, count)
        if low < high:
            found.append((first + low, high - low))
        before += count
    return tuple(found)


def _length(runs: _Runs) -> int:
    return sum(count for _, count in runs)


def _along(placement: Any) -> int | None:
    """The dimension that it shards, if it does."""
    return getattr(placement, "dim", None)


def _held(size: int, dim: int, dims: int, mesh: Any, placements: Any, at: Sequence[int]) -> _Runs:
    """What the process at these coordinates of the mesh holds along a dimension of a weight."""
    runs: _Runs = ((0, size),)
    for number, placement in enumerate(placements):
        along = _along(placement)
        if along is None or along % dims != dim:
            continue
        count, processes = _length(runs), mesh.shape[number]
        # FSDP2 cuts what tensor parallelism has cut already; DTensor says so by a factor.
        strides = getattr(placement, "split_factor", 1)
        kept: _Runs = ()
        for stride in range(strides):
            begin, end = _chunk(count, strides, stride)
            first, last = _chunk(end - begin, processes, at[number])
            kept += _between(runs, begin + first, begin + last)
        runs = kept
    return runs


def _joined(outer: _Runs, inner: _Runs, size: int) -> _Runs:
    """Indices of two dimensions, of which the inner one has this size, read as one."""
    if inner == ((0, size),):
        return tuple((first * size, count * size) for first, count in outer)
    lines = [line for first, count in outer for line in range(first, first + count)]
    return tuple((line * size + first, count) for line in lines for first, count in inner)


def _box(weight: Any, shape: Sequence[int], at: Sequence[int]) -> _Box:
    """What the process at these coordinates holds of a weight read as matrices of a shape (matrices, rows, columns)."""
    sizes = weight.shape
    held = [
        _held(size, dim, len(sizes), weight.device_mesh, weight.placements, at)
        for dim, size in enumerate(sizes)
    ]
    stacked = list(shape[1:]) == list(sizes[-2:])
    rows = len(sizes) - 2 if stacked else 0

    def join(begin: int, end: int) -> _Runs:
        runs: _Runs = ((0, 1),)
        for dim in range(begin, end):
            runs = _joined(runs, held[dim], sizes[dim])
        return runs

    return join(0, rows), held[rows], join(rows + 1, len(sizes))


def _common(ours: _Runs, theirs: _Runs) -> tuple[_Runs, _Runs]:
    """What two lists of runs share, in the order of ours: positions in ours, and in theirs."""
    in_ours: list[tuple[int, int]] = []
    in_theirs: list[tuple[int, int]] = []
    before = 0
    for first, count in ours:
        before_theirs = 0
        for other, others in theirs:
            low, high = max(first, other), min(first + count, other + others)
            if low < high:
                in_ours.append((before + low - first, high - low))
                in_theirs.append((before_theirs + low - other, high - low))
            before_theirs += others
        before += count
    return tuple(in_ours), tuple(in_theirs)


def _index(runs: _Runs, device: torch.device) -> slice | Tensor:
    """A slice if the runs are one."""
    if all(a + n == b for (a, n), (b, _) in pairwise(runs)):
        return slice(runs[0][0], runs[0][0] + _length(runs))
    positions = [i for first, count in runs for i in range(first, first + count)]
    return torch.tensor(positions, device=device)


def _take(tensor: Tensor, cut: _Cut) -> Tensor:
    for dim, index in enumerate(cut):
        if isinstance(index, slice):
            tensor = tensor.narrow(dim, index.start, index.stop - index.start)
        else:
            tensor = tensor.index_select(dim, index)
    return tensor


def _put(tensor: Tensor, cut: _Cut, values: Tensor) -> None:
    lists = []
    for dim, index in enumerate(cut):
        if isinstance(index, slice):
            tensor = tensor.narrow(dim, index.start, index.stop - index.start)
        else:
            lists.append(dim)
    if not lists:
        tensor.copy_(values)
    elif len(lists) == 1:
        tensor.index_copy_(lists[0], cast(Tensor, cut[lists[0]]), values)
    else:
        dim = lists[0]
        rest = [slice(0, size) if d not in lists else cut[d] for d, size in enumerate(tensor.shape)]
        rest[dim] = slice(0, 1)
        for position, line in enumerate(cast(Tensor, cut[dim]).tolist()):
            _put(
                tensor.narrow(dim, line, 1), cast(_Cut, tuple(rest)), values.narrow(dim, position, 1)
            )  # fmt: skip


# Who steps what.


class Entry(NamedTuple):
    """A weight in shards, and what its plan depends on."""

    weight: Tensor
    name: str
    layout: str  # "adamw" if AdamW steps it
    whole_segments: bool  # the steps of a segment's heads depend on each other
    group: int  # number of its parameter group
    options: str  # those of the group, and the step count


class _Unit(NamedTuple):
    """A set of heads that no group ever crosses, in matrices that the same processes hold."""

    segment: int
    heads: tuple[int, ...]
    lines: _Runs
    matrices: tuple[int, ...]
    held: dict[int, int]  # elements in one matrix by process, as numbers in the team
    work: float  # in one matrix


class _Geometry(NamedTuple):
    """How a weight lies on the processes of its team."""

    shape: list[int]  # matrices, rows, columns
    by_rows: bool
    boxes: list[_Box]
    units: list[_Unit]


class _Piece(NamedTuple):
    """Units of one owner that are orthogonalized in one tensor."""

    weight: int  # number of the entry
    owner: int
    owned_heads: str  # as step_ takes it
    sizes: list[int]  # matrices, rows, columns
    cuts: dict[int, tuple[_Cut, _Cut, list[int]]]  # by holder: in the piece, in the shard; sizes


def _teammates(mesh: Any, placements: Any) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Coordinates and ranks of the processes that together hold each element once, this one among them."""
    own = mesh.get_coordinate()
    all_ = [
        range(mesh.shape[dim]) if _along(placement) is not None else (own[dim],)
        for dim, placement in enumerate(placements)
    ]
    by_rank = {int(mesh.mesh[at]): at for at in product(*all_)}
    ranks = tuple(sorted(by_rank))
    return [by_rank[rank] for rank in ranks], ranks


def _geometry(entry: Entry, team: Sequence[Sequence[int]]) -> _Geometry:
    weight, name, layout, whole_segments, *_ = entry
    shape, segments, heads, lines, work = _ops.smallest_pieces(
        layout, list(weight.shape), name, whole_segments
    )
    by_rows = layout.split()[0] == "rows"
    boxes = [_box(weight, shape, at) for at in team]
    holders: dict[tuple[int, ...], list[int]] = defaultdict(list)  # of each matrix
    having = [{i for first, n in box[0] for i in range(first, first + n)} for box in boxes]
    for matrix in range(shape[0]):
        holders[tuple(p for p, own in enumerate(having) if matrix in own)].append(matrix)
    units = []
    for segment, own_heads, flat, own_work in zip(segments, heads, lines, work, strict=True):
        runs = tuple(zip(flat[::2], flat[1::2], strict=True))
        for processes, matrices in holders.items():
            held = {}
            for process in processes:
                _, rows, cols = boxes[process]
                along, across = (rows, cols) if by_rows else (cols, rows)
                if elements := _length(_common(runs, along)[0]) * _length(across):
                    held[process] = elements
            if held:
                units.append(
                    _Unit(segment, tuple(own_heads), runs, tuple(matrices), held, own_work)
                )
    return _Geometry(shape, by_rows, boxes, units)


class _Team:
    """The processes that hold the shards of some weights, each element once."""

    def __init__(self, ranks: tuple[int, ...], group: Any) -> None:
        self.ranks = ranks
        self.group = group
        self.me = ranks.index(dist.get_rank())
        in_group = dist.get_process_group_ranks(group) if group is not None else list(ranks)
        self.places = [in_group.index(rank) for rank in ranks]
        self.numbers: list[int] = []  # of its entries
        self.geometries: dict[int, _Geometry] = {}
        self.pieces: list[_Piece] = []  # those that this process owns or holds a part of
        self.traded: set[int] = set()  # entries with pieces that several processes hold
        self.bytes_sent = 0

    def plan(self, entries: Sequence[Entry]) -> None:
        """Gives each unit to an owner: to its only holder; else to one of those that hold at least an even share, which
        keeps traffic within that of even shards, the most expensive first, to the one with the least work."""
        work = [0.0] * len(self.ranks)
        free = []
        owned: dict[tuple[int, int, int, bool], dict[int, list[_Unit]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for number in self.numbers:
            for unit in self.geometries[number].units:
                if len(unit.held) > 1:
                    self.traded.add(number)
                    free += [(number, unit, matrix) for matrix in unit.matrices]
                    continue
                (owner,) = unit.held
                work[owner] += unit.work * len(unit.matrices)
                for matrix in unit.matrices:
                    owned[number, unit.segment, owner, False][matrix].append(unit)
        for number, unit, matrix in sorted(free, key=lambda item: -item[1].work):
            enough = sum(unit.held.values()) / len(self.ranks)
            candidates = [process for process, held in unit.held.items() if held >= enough]
            owner = min(candidates, key=lambda process: work[process])
            work[owner] += unit.work
            owned[number, unit.segment, owner, True][matrix].append(unit)
        self.pieces = []
        for (number, segment, owner, _), by_matrix in sorted(owned.items(), key=lambda i: i[0]):
            device = entries[number].weight.device
            same: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
            for matrix in sorted(by_matrix):
                same[tuple(sorted(unit.heads for unit in by_matrix[matrix]))].append(matrix)
            for matrices in same.values():
                units = by_matrix[matrices[0]]
                piece = self._piece(number, segment, owner, matrices, units, device)
                if self.me == owner or self.me in piece.cuts:
                    self.pieces.append(piece)

    def _piece(
        self, number: int, segment: int, owner: int, matrices: list[int], units: list[_Unit], device: torch.device
    ) -> _Piece:  # fmt: skip
        shape, by_rows, boxes, _ = self.geometries[number]
        # As the library reads a tensor of heads: in the order of their numbers.
        by_head = {}
        for unit in units:
            rows = _length(unit.lines) // max(1, len(unit.heads))
            for position, head in enumerate(unit.heads):
                by_head[head] = _between(unit.lines, position * rows, (position + 1) * rows)
        lines = sum((by_head[head] for head in sorted(by_head)), ()) or units[0].lines
        whole = ((0, shape[2] if by_rows else shape[1]),)
        ours = (
            tuple((matrix, 1) for matrix in matrices),
            lines if by_rows else whole,
            whole if by_rows else lines,
        )
        sizes = [len(matrices), _length(ours[1]), _length(ours[2])]
        cuts = {}
        involved = range(len(boxes)) if owner == self.me else [self.me]
        for process in involved:
            common = [_common(a, b) for a, b in zip(ours, boxes[process], strict=True)]
            if all(runs for runs, _ in common):
                in_piece = tuple(_index(runs, device) for runs, _ in common)
                in_shard = tuple(_index(runs, device) for _, runs in common)
                cut_sizes = [_length(runs) for runs, _ in common]
                cuts[process] = cast(_Cut, in_piece), cast(_Cut, in_shard), cut_sizes
        heads = "-".join(map(str, sorted(by_head)))
        text = f"{'x'.join(map(str, shape))}/{segment}/{heads}" if heads else ""
        return _Piece(number, owner, text, sizes, cuts)


class _Circle(NamedTuple):
    """All processes of a mesh, replicas included. They compare what they do."""

    ranks: tuple[int, ...]
    exchange: Any  # torch.classes.group_muon.Exchange
    numbers: list[int]  # of the entries on the mesh


class _Message(NamedTuple):
    """A tensor for a process, or what one expects from it."""

    process: int  # number in the team
    tensor: Tensor


class _Trade:
    """An all-to-all on its way."""

    def __init__(
        self, team: _Team, device: torch.device, sent: Sequence[_Message], expected: Sequence[_Message]
    ) -> None:  # fmt: skip
        self._team, self._expected = team, expected
        send, receive = self._counts(sent), self._counts(expected)
        # As bytes: of several types, in one collective of any backend.
        parts = [
            message.tensor.contiguous().view(-1).view(torch.uint8)
            for message in sorted(sent, key=self._place)
        ]
        self._sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
        self._received = self._sent.new_empty(sum(receive))
        team.bytes_sent += len(self._sent)
        self._work = dist.all_to_all_single(
            self._received, self._sent, receive, send, group=team.group, async_op=True
        )

    def _place(self, message: _Message) -> int:
        return self._team.places[message.process]

    def _counts(self, messages: Sequence[_Message]) -> list[int]:
        counts = [0] * len(self._team.ranks)
        for message in messages:
            counts[self._place(message)] += message.tensor.nbytes
        return counts

    def wait(self) -> None:
        """Fills the expected tensors."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"group_muon: process {dist.get_rank()} could not exchange shards with processes "
                f"{list(self._team.ranks)}: another one ended or did not answer in time ({error})"
            ) from error
        first = 0
        for message in sorted(self._expected, key=self._place):
            tensor = message.tensor
            part = self._received[
                first : first + tensor.nbytes
            ].clone()  # begins where any type may
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
            first += tensor.nbytes


class _Shard(NamedTuple):
    """A weight of a step: this process's shard of each tensor, contiguous."""

    number: int
    weight: Tensor
    grad: Tensor
    momentum: Tensor
    layout: str
    name: str
    partition: str
    step: int
    lr: float
    weight_decay: float
    lr_fraction: float
    sizes: list[int]  # of the whole weight
    lines: list[int]  # that the shard has: first and number of each run
    single: bool  # not a stack of matrices
    options: str


def _by_options(shards: Iterable[_Shard]) -> dict[str, list[_Shard]]:
    found: dict[str, list[_Shard]] = defaultdict(list)
    for shard in shards:
        found[shard.options].append(shard)
    return found


def _precision(options: str, device: torch.device) -> torch.dtype:
    """What the library orthogonalizes in."""
    values = dict(word.split("=", 1) for word in options.split())
    name, *_ = _ops.resolved(values["method"], values["precision"], values["engine"], device)
    return getattr(torch, name)


class _TeamStep:
    """A team's part of a step: directions go to the owners of pieces, updates come back."""

    def __init__(
        self, team: _Team, shards: Mapping[int, _Shard], directions: Mapping[int, Tensor],
        updates: Mapping[int, Tensor],
    ) -> None:  # fmt: skip
        self._team, self._shards = team, shards
        self._directions, self._updates = directions, updates
        pieces = [piece for piece in team.pieces if piece.weight in shards]
        self._lent = [piece for piece in pieces if piece.owner != team.me]
        own = [piece for piece in pieces if piece.owner == team.me]
        self._whole = [piece for piece in own if len(piece.cuts) == 1]
        self._gathered = [piece for piece in own if len(piece.cuts) > 1]
        self._trades = not team.traded.isdisjoint(shards)
        self._device = next(directions[n].device for n in team.numbers if n in shards)
        self._arriving = [
            (piece, process, directions[piece.weight].new_empty(sizes))
            for piece in self._gathered
            for process, (_, _, sizes) in piece.cuts.items()
            if process != team.me
        ]
        lent = [_Message(piece.owner, self._own(directions, piece)) for piece in self._lent]
        self._trade = self._start(lent, [_Message(p, tensor) for _, p, tensor in self._arriving])

    def _start(self, sent: list[_Message], expected: list[_Message]) -> _Trade | None:
        return _Trade(self._team, self._device, sent, expected) if self._trades else None

    def _own(self, tensors: Mapping[int, Tensor], piece: _Piece) -> Tensor:
        """This process's part of a piece."""
        return _take(tensors[piece.weight], piece.cuts[self._team.me][1])

    def step_whole(self) -> None:
        """The pieces that this process alone holds."""
        results = self._orthogonalize(
            self._whole, [self._own(self._directions, piece).contiguous() for piece in self._whole]
        )
        for piece, result in zip(self._whole, results, strict=True):
            in_piece, in_shard, _ = piece.cuts[self._team.me]
            _put(self._updates[piece.weight], in_shard, _take(result, in_piece))

    def step_gathered(self) -> None:
        """The pieces that this process gets from others; starts to send their updates."""
        if self._trade is not None:
            self._trade.wait()
        whole = [self._directions[p.weight].new_empty(p.sizes) for p in self._gathered]
        at = {id(piece): tensor for piece, tensor in zip(self._gathered, whole, strict=True)}
        for piece in self._gathered:
            _put(at[id(piece)], piece.cuts[self._team.me][0], self._own(self._directions, piece))
        for piece, process, tensor in self._arriving:
            _put(at[id(piece)], piece.cuts[process][0], tensor)
        results = self._orthogonalize(self._gathered, whole)
        sent = []
        for piece, result in zip(self._gathered, results, strict=True):
            for process, (in_piece, in_shard, _) in piece.cuts.items():
                part = _take(result, in_piece)
                if process == self._team.me:
                    _put(self._updates[piece.weight], in_shard, part)
                else:
                    sent.append(_Message(process, part))
        self._returning = [
            (piece, self._updates[piece.weight].new_empty(piece.cuts[self._team.me][2]))
            for piece in self._lent
        ]
        expected = [_Message(piece.owner, tensor) for piece, tensor in self._returning]
        self._trade = self._start(sent, expected)

    def finish(self) -> None:
        if self._trade is not None:
            self._trade.wait()
        for piece, tensor in self._returning:
            _put(self._updates[piece.weight], piece.cuts[self._team.me][1], tensor)

    def _orthogonalize(
        self, pieces: Sequence[_Piece], directions: Sequence[Tensor]
    ) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for options in dict.fromkeys(shard.options for shard in self._shards.values()):
            chosen = [
                i for i, piece in enumerate(pieces) if self._shards[piece.weight].options == options
            ]
            shards = [self._shards[pieces[i].weight] for i in chosen]
            found = _ops.orthogonalize_parts(
                [
                    directions[i].view(pieces[i].sizes[1:] if shard.single else pieces[i].sizes)
                    for i, shard in zip(chosen, shards, strict=True)
                ],
                [shard.layout for shard in shards],
                [shard.name for shard in shards],
                [shard.partition for shard in shards],
                [shard.step for shard in shards],
                [shard.lr_fraction for shard in shards],
                [shard.sizes for shard in shards],
                [pieces[i].owned_heads for i in chosen],
                options,
            )
            results |= {i: r.view(pieces[i].sizes) for i, r in zip(chosen, found, strict=True)}
        return [results[i] for i in range(len(pieces))]


def _like(grad: Any, weight: Any, name: str) -> Tensor:
    """The gradient, lying as the weight does."""
    if not is_sharded(grad):
        raise TypeError(
            f"group_muon: parameter '{name}' is a DTensor, so its gradient should be one, too, not a plain tensor"
        )
    if grad.device_mesh != weight.device_mesh:
        raise ValueError(
            f"group_muon: the gradient of '{name}' lies on the mesh {grad.device_mesh}, but the parameter on "
            f"{weight.device_mesh}"
        )
    if grad.placements != weight.placements:
        grad = grad.redistribute(weight.device_mesh, weight.placements)
    return grad


class Shards:
    """This process's side of the steps of all weights in shards."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._groups: dict[tuple[int, ...], Any] = {}
        self._circles: list[_Circle] = []
        self._bytes_sent = 0  # by circles and teams of earlier plans
        self._teams: dict[tuple[int, ...], _Team] = {}
        self._plan(entries)
        self._compare()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other processes so far."""
        circles = sum(circle.exchange.bytes_sent() for circle in self._circles)
        return self._bytes_sent + circles + sum(team.bytes_sent for team in self._teams.values())

    def _plan(self, entries: Sequence[Entry]) -> None:
        self._bytes_sent += sum(team.bytes_sent for team in self._teams.values())
        self.entries = list(entries)
        self._planned = [entry[2:4] for entry in entries]
        self._numbers = {id(entry.weight): number for number, entry in enumerate(entries)}
        self._teams = {}
        known: dict[Any, _Geometry] = {}
        for number, entry in enumerate(self.entries):
            weight, name, layout, whole_segments, *_ = entry
            mesh, placements = cast(Any, weight).device_mesh, cast(Any, weight).placements
            if any(placement.is_partial() for placement in placements):
                raise ValueError(
                    f"group_muon: parameter '{name}' has the placements {placements}; a weight should not be a sum over "
                    "processes"
                )
            if layout == "adamw" or mesh.get_coordinate() is None:
                continue
            coordinates, ranks = _teammates(mesh, placements)
            if ranks not in self._teams:
                self._teams[ranks] = _Team(ranks, self._group(mesh, placements, ranks))
            key = layout, whole_segments, weight.shape, placements, mesh.shape, tuple(coordinates)
            if key not in known:
                known[key] = _geometry(entry, coordinates)
            team = self._teams[ranks]
            team.numbers.append(number)
            team.geometries[number] = known[key]
            expected = prod(_length(runs) for runs in known[key].boxes[team.me])
            if expected != local(weight).numel():
                raise ValueError(
                    f"group_muon: parameter '{name}' of shape {list(weight.shape)} has {local(weight).numel()} elements "
                    f"here, but its placements {placements} give it {expected}"
                )
        for team in self._teams.values():
            team.plan(self.entries)

    def _group(self, mesh: Any, placements: Any, ranks: tuple[int, ...]) -> Any:
        """A process group of these ranks of a mesh."""
        cut = [d for d, p in enumerate(placements) if _along(p) is not None and mesh.shape[d] > 1]
        if len(cut) == 1:
            return mesh.get_group(cut[0])
        return self._group_of(ranks) if cut else None

    def _group_of(self, ranks: tuple[int, ...]) -> Any:
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]

    def _compare(self) -> None:
        """Collective. Rejects a process with other weights, layouts, meshes or options, and names it."""
        by_ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, entry in enumerate(self.entries):
            mesh = cast(Any, entry.weight).device_mesh
            if mesh.get_coordinate() is not None:
                by_ranks[tuple(sorted(mesh.mesh.flatten().tolist()))].append(number)
        circles = [self._circle(ranks, numbers) for ranks, numbers in by_ranks.items()]
        self._bytes_sent += sum(circle.exchange.bytes_sent() for circle in self._circles)
        self._circles = circles

    def _circle(self, ranks: tuple[int, ...], numbers: list[int]) -> _Circle:
        """Collective among these ranks: compares their weights on one mesh."""
        names, layouts, whole, like = [], [], [], []
        for weight, name, layout, whole_segments, *_ in (self.entries[n] for n in numbers):
            mesh, placements = cast(Any, weight).device_mesh, cast(Any, weight).placements
            names.append(f"{name} {' '.join(map(str, placements))} of {mesh.mesh.tolist()}")
            layouts.append(layout)
            whole.append(whole_segments)
            like.append(local(weight).new_empty(()).expand(weight.shape))  # needs no memory
        exchange = torch.classes.group_muon.Exchange(
            self._group_of(ranks).group_name, names, like, layouts, whole, self._options_of(numbers)
        )
        return _Circle(ranks, exchange, numbers)

    def _options_of(self, numbers: Sequence[int]) -> str:
        """The options of these weights and which of them share a group. Those of others are none of the mesh's concern: a
        process may have weights that no one else has."""
        first: dict[int, int] = {}
        texts = dict.fromkeys(self.entries[number].options for number in numbers)
        order = {text: i for i, text in enumerate(texts)}
        places = [
            (first.setdefault(entry.group, len(first)), order[entry.options])
            for entry in (self.entries[number] for number in numbers)
        ]
        return f"{list(texts)} {places}"

    def agree(self, entries: Sequence[Entry], active: Iterable[Tensor]) -> None:
        """Before a step. Collective if something is exchanged: rejects a process that would do anything else than the
        others, and names it. `active` are the weights with gradients. New layouts are planned."""
        if [id(entry.weight) for entry in self.entries] != [id(entry.weight) for entry in entries]:
            self._plan(entries)
            self._compare()
        numbers = {self._numbers[id(weight)] for weight in active}
        traded = {number for team in self._teams.values() for number in team.traded}
        self.entries = list(entries)
        for i, circle in enumerate(self._circles):
            if traded.isdisjoint(circle.numbers):
                continue
            options = self._options_of(circle.numbers)
            which = [(*self.entries[n][1:4], n in numbers) for n in circle.numbers]
            digest = hashlib.blake2b(f"{options} {which}".encode(), digest_size=7).digest()
            key = int.from_bytes(digest, "big")
            most, least = circle.exchange.largest([key, -key])
            if most == -least:
                continue
            self._bytes_sent += circle.exchange.bytes_sent()
            self._circles[i] = circle = self._circle(circle.ranks, circle.numbers)
            grads = [torch.empty(()) if n in numbers else None for n in circle.numbers]
            circle.exchange.with_gradient(grads, True, options)
        if self._planned != [entry[2:4] for entry in entries]:
            self._plan(entries)

    def step(self, batches: Mapping[str, Sequence[_Weight]]) -> None:
        """Steps Muon's weights, by their options."""
        shards = {
            shard.number: shard
            for options, weights in batches.items()
            for shard in self._shards_of(weights, options)
        }
        directions: dict[int, Tensor] = {}
        updates: dict[int, Tensor] = {}
        for options, some in _by_options(shards.values()).items():
            _, weights_, grads, momenta, layouts, names, *_ = map(list, zip(*some, strict=True))
            found = _ops.accumulate_parts(weights_, grads, momenta, layouts, names, options)
            for shard, direction in zip(some, found, strict=True):
                _, box = self._place_of(shard.number)
                directions[shard.number] = direction.view([_length(runs) for runs in box])
                updates[shard.number] = torch.empty_like(
                    directions[shard.number], dtype=_precision(options, direction.device)
                )
        teams = [
            team for team in self._teams.values() if not shards.keys().isdisjoint(team.numbers)
        ]
        steps_ = [_TeamStep(team, shards, directions, updates) for team in teams]
        for own in steps_:  # while directions are on their way
            own.step_whole()
        for own in steps_:
            own.step_gathered()
        for own in steps_:
            own.finish()
        for options, some in _by_options(shards.values()).items():
            (
                _, weights_, _, _, layouts, names, partitions, steps, lrs, decays, fractions, sizes, lines, *_
            ) = map(list, zip(*some, strict=True))  # fmt: skip
            views = [updates[shard.number].view(shard.weight.shape) for shard in some]
            _ops.apply_parts(
                weights_,
                views,
                layouts,
                names,
                partitions,
                steps,
                lrs,
                decays,
                fractions,
                sizes,
                lines,
                options,
            )
            for shard in some:
                self._write_back(self.entries[shard.number].weight, shard.weight)

    def _place_of(self, number: int) -> tuple[_Team, _Box]:
        for team in self._teams.values():
            if number in team.geometries:
                return team, team.geometries[number].boxes[team.me]
        raise KeyError(number)

    def _shards_of(self, weights: Sequence[_Weight], options: str) -> list[_Shard]:
        shards = []
        for (
            weight,
            grad,
            momentum,
            layout,
            name,
            partition,
            step,
            lr,
            decay,
            fraction,
            _,
        ) in weights:
            number = self._numbers[id(weight)]
            team, box = self._place_of(number)
            lines = box[1] if team.geometries[number].by_rows else box[2]
            shards.append(
                _Shard(
                    number, local(weight).contiguous(), local(_like(grad, weight, name)).contiguous(), local(momentum),
                    layout, name, partition, step, lr, decay, fraction, list(weight.shape), [n for run in lines for n in run],
                    team.geometries[number].shape[0] == 1, options,
                )
            )  # fmt: skip
        return shards

    @staticmethod
    def _write_back(weight: Tensor, stepped: Tensor) -> None:
        own = local(weight)
        if own.data_ptr() != stepped.data_ptr():
            own.copy_(stepped)
        torch.autograd.graph.increment_version(weight)

    def step_adamw(
        self, group: Mapping[str, Any], weights: Sequence[Tensor], states: MutableMapping[Tensor, Any]
    ) -> None:  # fmt: skip
        """Steps weights of one of AdamW's groups. Nothing is exchanged."""
        shards = []
        for weight in weights:
            name = self.entries[self._numbers[id(weight)]].name
            grad = local(_like(weight.grad, weight, name)).contiguous()
            shards.append((local(weight).contiguous(), grad, states[weight], _positions(weight)))
        adamw.step_shards(
            group,
            [
                adamw.Shard(
                    weight,
                    grad,
                    local(state["exp_avg"]),
                    local(state["exp_avg_sq"]),
                    state["step"],
                    *at,
                )
                for weight, grad, state, at in shards
            ],
        )
        for weight, (stepped, *_) in zip(weights, shards, strict=True):
            self._write_back(weight, stepped)


def _positions(weight: Any) -> tuple[list[int], int]:
    """Where the last elements of a shard lie among all elements of its weight, and the number of these."""
    sizes, mesh = weight.shape, weight.device_mesh
    held = [
        [i for first, count in runs for i in range(first, first + count)]
        for runs in (
            _held(size, dim, len(sizes), mesh, weight.placements, mesh.get_coordinate())
            for dim, size in enumerate(sizes)
        )
    ]
    count = prod(map(len, held))
    positions = []
    for flat in range(max(0, count - adamw.ALIGNED), count):
        place = 0
        left = count
        for size, indices in zip(sizes, held, strict=True):
            left //= len(indices)
            place = place * size + indices[flat // left % len(indices)]
        positions.append(place)
    return positions, prod(sizes)
