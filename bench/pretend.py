"""A pretended GPU. Its tensors say that they are on cuda:0; their data is on the CPU or on meta. Counts what a GPU would
see of a step: operator calls, those that launch work, copies from the host, and waits for the device."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda:0")
torch.cuda._lazy_init = lambda: (
    None
)  # torch.empty(device=DEVICE) would look for a GPU before it comes to us
_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh")
_WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2")


class Pretend(torch.Tensor):
    """The tensor `here`, as a tensor on DEVICE."""

    @staticmethod
    def __new__(cls, here):
        made = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
            device=DEVICE, requires_grad=here.requires_grad,
        )  # fmt: skip
        made.here = here.detach()
        return made

    def __getitem__(self, index):  # Python's own would ask for a GPU
        if isinstance(index, slice):
            return torch.ops.aten.slice(self, 0, index.start, index.stop, index.step or 1)
        return self.select(0, index)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def weight(*shape, device="cpu"):
    """A weight with a gradient."""
    made = Pretend(torch.randn(shape, device=device)).requires_grad_()
    made.grad = Pretend(torch.randn(shape, device=device))
    return made


def _is_there(device):
    return device is not None and torch.device(device).type == DEVICE.type


def _run(function, args, kwargs, place="cpu"):
    def here(value):
        if isinstance(value, Pretend):
            return value.here
        return (
            torch.device(place) if isinstance(value, torch.device) and _is_there(value) else value
        )

    pretended = any(isinstance(leaf, Pretend) for leaf in tree_flatten((args, kwargs))[0])
    wanted = kwargs.get("device")
    result = function(*tree_map(here, args), **tree_map(here, kwargs))
    if not (pretended if wanted is None else _is_there(wanted)):
        return result
    if function._schema.is_mutable and isinstance(result, torch.Tensor):
        return args[0]  # written in place
    return tree_map(lambda r: Pretend(r) if isinstance(r, torch.Tensor) else r, result)


def _onto_itself(function, args):
    """A view of a pretended tensor does not know what it is a view of, so our code copies it back."""
    if function is not torch.ops.aten.copy_.default:
        return False
    into, source = (t.here if isinstance(t, Pretend) else t for t in args[:2])
    same = into.untyped_storage()._cdata == source.untyped_storage()._cdata
    return same and into.storage_offset() == source.storage_offset()


class Calls(TorchDispatchMode):
    """Counts inside a `with` block. Composite operators and those of group_muon are counted by the calls inside them.

    data: where the data of pretended tensors is, "cpu" or "meta"."""

    def __init__(self, data="cpu"):
        super().__init__()
        self.data = data
        self.names = Counter()
        self.launches = self.copies = self.waits = 0

    @property
    def total(self):
        return self.names.total()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "group_muon":
            with self:  # our kernel calls operators, which come here
                key = torch._C.DispatchKey.CompositeExplicitAutograd
                return function._op_dk(key, *args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), "CompositeImplicitAutograd"
        ):
            with self:
                return function.decompose(*args, **kwargs)
        self._count(function, args, kwargs)
        return _run(function, args, kwargs, self.data)

    def _count(self, function, args, kwargs):
        name = function._schema.name.removeprefix("aten::")
        leaves = tree_flatten((args, kwargs))[0]
        there = [isinstance(leaf, Pretend) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        wanted = kwargs.get("device")
        if not (any(there) or _is_there(wanted)) or _onto_itself(function, args):
            return  # work on the host alone, or none
        self.names[name] += 1
        self.launches += not (function.is_view or name in _ALLOCATES)
        up, down = False, name in _WAITS
        if name == "_to_copy" and wanted is not None:
            up, down = not there[0], not _is_there(wanted)
        elif name == "copy_":
            up, down = there == [True, False], there == [False, True]
        self.copies += up
        self.waits += down
