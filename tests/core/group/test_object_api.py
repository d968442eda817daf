"""Every form of ProcessGroup's methods that torch's stub lists, with Gloo's outcome as the rule."""

from __future__ import annotations

import ast
import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from sealring.core.group.process_group import SealedProcessGroup
from tests.core.group.beside_gloo import both, gloo_lacks, outcome, plain
from tests.workers import Workers

ELSEWHERE: Final = {
    "__init__": "create_group makes the group",
    "abort": "test_lifetimes.py",
    "shutdown": "test_lifetimes.py",
    "_device_types": "test_devices.py",
    "_set_group_name": "torch calls it once, when the group is made",
    "_set_group_desc": "torch calls it once, when the group is made",
    "_start_coalescing": "test_every_collective.py; Gloo has none",
    "_end_coalescing": "test_every_collective.py; Gloo has none",
    "register_pre_hook": "tests/torch_versions/checks.py",
    "register_post_hook": "tests/torch_versions/checks.py",
    "supports_reconfigure": "tests/torch_versions/checks.py; Gloo has it from torch 2.14",
    "reconfigure": "torch refuses it, because supports_reconfigure is False",
}
"""Members of the stub that Gloo's outcome is no rule for, and where they are tested."""

ATTRIBUTES: Final = {
    "rank": lambda g: g.rank(),
    "size": lambda g: g.size(),
    "boxed": lambda g: type(g.boxed()).__name__,
    "unbox": lambda g: dist.ProcessGroup.unbox(g.boxed()) is g,
    "get_group_store": lambda g: type(g.get_group_store()).__name__,
    "set_timeout": lambda g: _with_timeout(g),
    "_get_backend": lambda g: g._get_backend(torch.device("cpu")).size(),
    "_get_backend_name": lambda g: g._get_backend_name() in ("gloo", "sealring"),
    "name": lambda g: g.name() in ("gloo", "sealring", "undefined"),
    "_has_hooks": lambda g: g._has_hooks(),
    "_set_sequence_number_for_group": lambda g: _counted(g),
    "bound_device_id": lambda g: g.bound_device_id,
    "use_pg_for_symm_mem_rendezvous": lambda g: g.use_pg_for_symm_mem_rendezvous,
    "group_name": lambda g: isinstance(g.group_name, str),
    "group_desc": lambda g: isinstance(g.group_desc, str),
}


def _with_timeout(group: Any) -> Any:
    before = group._get_backend(torch.device("cpu")).options._timeout
    group.set_timeout(timedelta(seconds=77))
    after = group._get_backend(torch.device("cpu")).options
    seen = after._timeout.total_seconds(), after.global_ranks_in_group, type(after.backend).__name__
    group.set_timeout(before)
    return seen


def _counted(group: Any) -> int:
    group._set_sequence_number_for_group()
    first = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2), group=group)
    dist.barrier(group=group)
    return int(group._get_sequence_number_for_group() - first)


def stub() -> list[tuple[str, list[tuple[str, str, bool]], str]]:
    """(method, parameters as (name, type, has a default), result) for every overload."""
    text = Path(torch.__path__[0], "_C", "_distributed_c10d.pyi").read_text()
    classes = [each for each in ast.parse(text).body if isinstance(each, ast.ClassDef)]
    (found,) = [each for each in classes if each.name == "ProcessGroup"]
    forms = []
    for function in found.body:
        if isinstance(function, ast.FunctionDef):
            arguments = [each for each in function.args.args if each.arg != "self"]
            without = len(arguments) - len(function.args.defaults)
            parameters = [
                (each.arg, ast.unparse(each.annotation) if each.annotation else "", at >= without)
                for at, each in enumerate(arguments)
            ]
            result = ast.unparse(function.returns) if function.returns else ""
            forms.append((function.name, parameters, result))
    return forms


COLLECTIVES: Final = {name for name, _, result in stub() if result == "Work"} - ELSEWHERE.keys()
OWN: Final = {
    name
    for base in SealedProcessGroup.__mro__
    if base.__module__.startswith("sealring")
    for name in vars(base)
}
"""What sealring's class defines; all else is torch's own code."""


def numbers(rank: int, length: int = 2) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32) + 10 * rank + 1


def value_of(method: str, name: str, kind: str, rank: int, world: int) -> Any:
    """An argument for the parameter `name` of type `kind`."""
    rooted = method in ("gather", "scatter") and rank != 0
    whole = any(word in method for word in ("single", "base", "tensor_coalesced"))
    if kind.startswith("list[list["):
        if rooted:
            return []
        lists = world if method == "allgather_coalesced" else 1
        length = 1 if method == "allgather_coalesced" else world
        return [[numbers(rank) for _ in range(length)] for _ in range(lists)]
    gathered = "gather" in method and "reduce" not in method
    long = whole and (name.startswith("out") if gathered else name.startswith("in"))
    long = long or "to_all_single" in method or method == "alltoall_base"
    tensor = numbers(rank, 2 * world if long else 2)
    if kind == "list[Tensor]":
        listed_per_rank = (
            method == "alltoall"
            or (method in ("allgather", "gather") and name == "output_tensors")
            or (method in ("scatter", "reduce_scatter") and name.startswith("input"))
        )
        if listed_per_rank:
            return [] if rooted else [numbers(rank) for _ in range(world)]
        return [tensor]
    if kind == "Tensor":
        return tensor
    if kind == "list[int]":
        return [2] * world
    return {
        "root": 0,
        "op": dist.ReduceOp.MAX,
        "timeout": timedelta(seconds=30),
        "dstRank": 1 - rank,
        "srcRank": 1 - rank,
        "tag": 3,
    }[name]


def options_of(method: str) -> Any:
    kinds = {
        "broadcast": "Broadcast", "allreduce": "Allreduce", "barrier": "Barrier",
        "allreduce_coalesced": "AllreduceCoalesced", "reduce": "Reduce",
        "gather": "Gather", "gather_single": "Gather", "gather_into_tensor": "Gather",
        "scatter": "Scatter", "alltoall": "AllToAll",
        "alltoall_base": "AllToAll", "all_to_all_single": "AllToAll",
    }  # fmt: skip
    kind = kinds.get(method, "ReduceScatter" if "reduce" in method else "Allgather")
    return getattr(c10d, f"{kind}Options")()


def call(group: Any, method: str, arguments: dict[str, Any], how: str) -> Any:
    """Makes the call and returns the tensors' values after it."""
    peer = 1 - group.rank()

    def start() -> Any:
        function = getattr(group, method)
        return function(**arguments) if how == "keywords" else function(*arguments.values())

    if method == "send":
        work = start()
        group.recv([received := numbers(9)], peer, 3).wait()
        work.wait()
        return received
    if method == "recv":
        work = start()
        group.send([numbers(group.rank())], peer, 3).wait()
    elif method == "recv_anysource" and group.rank() == 0:
        if how == "positions":  # the other rank's keywords are refused
            group.send([numbers(5)], peer, 3).wait()
        return "sent"
    else:
        work = start()
    done = work.wait()
    if method == "reduce" and group.rank() != 0:
        return done, "the tensors of ranks that are not the root are not defined with Gloo"
    return done, [value for value in arguments.values() if _holds_tensors(value)]


def _holds_tensors(value: Any) -> bool:
    splits = isinstance(value, list) and value and isinstance(value[0], int)
    return isinstance(value, torch.Tensor | list) and not splits


def every_form(rank: int, world: int) -> list[tuple[Any, Any, Any]]:
    differ = []
    with both(world) as groups:
        for method, parameters, _ in stub():
            if method not in COLLECTIVES:
                continue
            needed = [each for each in parameters if not each[2] and each[0] != "opts"]
            for given, how in itertools.product((needed, parameters), ("positions", "keywords")):
                outcomes = {}
                for name, group in groups.items():
                    arguments = {
                        each: options_of(method)
                        if each == "opts"
                        else value_of(method, each, kind or "int", rank, world)
                        for each, kind, _ in given
                    }
                    outcomes[name] = outcome(
                        lambda g, m=method, a=arguments, h=how: call(g, m, a, h), group
                    )
                kinds = {kind for kind, _ in outcomes.values()}
                kind, result = outcomes["sealring"]
                if kind != "value":  # torch's own refusals name the backend
                    result = result.replace("sealring", "gloo")
                same = (kind, result) == outcomes["gloo"] or kinds == {"TypeError"}
                same = same or gloo_lacks(outcomes["gloo"])
                form = (method, how, [each[0] for each in given])
                differ.append((same, form, outcomes))
    return differ


def test_every_overload_does_what_it_does_with_gloo(workers: Workers) -> None:
    for forms in workers.run(every_form, world=2):
        assert len(forms) > 100
        assert [form for form in forms if not form[0]] == []
        done = {form[0] for _, form, outcomes in forms if outcomes["sealring"][0] == "value"}
        assert done >= COLLECTIVES & OWN


def every_attribute(rank: int, world: int) -> dict[str, list[Any]]:
    with both(world) as groups:
        return {
            name: [outcome(ask, group) for group in groups.values()]
            for name, ask in ATTRIBUTES.items()
            if hasattr(dist.ProcessGroup, name)
        }


def test_every_other_member_answers_as_with_gloo(workers: Workers) -> None:
    for answers in workers.run(every_attribute, world=2):
        for name, (ours, gloos) in answers.items():
            assert ours == gloos, name


def test_no_member_of_the_stub_is_left_out() -> None:
    """Every collective is called, and every other member that sealring defines."""
    members = {name for name, *_ in stub()}
    assert members & OWN <= COLLECTIVES | set(ATTRIBUTES) | set(ELSEWHERE), "say where it is tested"


def several_per_list(rank: int, world: int) -> list[Any]:
    def pair() -> list[torch.Tensor]:
        return [numbers(rank), numbers(rank + 5)]

    def reduced(group: Any, op: Any) -> Any:
        group.allreduce(tensors := pair(), op).wait()
        return tensors

    def sent(group: Any) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 1, 1
        group.broadcast(tensors := pair(), options).wait()
        return tensors

    def gathered(group: Any) -> Any:
        lists = [[torch.zeros(2) for _ in range(2 * world)] for _ in range(2)]
        group.allgather(lists, pair()).wait()
        return lists

    ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    calls = [*(lambda g, op=op: reduced(g, op) for op in ops), sent, gathered]
    with both(world) as groups:
        return [[outcome(each, group) for group in groups.values()] for each in calls]


def test_several_tensors_per_list_are_combined_as_with_gloo(workers: Workers) -> None:
    for rank_outcomes in workers.run(several_per_list, world=2):
        for ours, gloos in rank_outcomes:
            assert gloos[0] == "value"
            assert ours == gloos


def shapes_kept(rank: int, world: int) -> Any:
    group: Any = dist.group.WORLD
    tensor = torch.ones(1)
    future = group.allreduce(tensor).get_future()
    return plain(future.wait()), plain(tensor)


def test_a_bare_tensor_keeps_its_shape(workers: Workers) -> None:
    """A tensor of one element, taken for a list, would be reduced as a scalar."""
    for result, tensor in workers.run(shapes_kept, world=2):
        assert tensor == ["tensor", "torch.float32", [1], [2.0]]
        assert result == [tensor]


def futures(rank: int, world: int) -> dict[str, list[Any]]:
    """What the future of each collective holds, with one tensor and with several."""

    def zeros(count: int) -> list[torch.Tensor]:
        return [torch.zeros(2) for _ in range(count)]

    def pair() -> list[torch.Tensor]:
        return [numbers(rank), numbers(rank + 5)]

    # Not those into one tensor, which Gloo shows in parts and NCCL whole, as we do; and Gloo's
    # reduce_scatter has no future.
    calls: dict[str, tuple[str, Any]] = {
        "all_gather": ("allgather", lambda: ([zeros(world)], [numbers(rank)])),
        "all_gather of two": ("allgather", lambda: ([zeros(2 * world) for _ in pair()], pair())),
        "coalesced": ("allgather_coalesced", lambda: ([zeros(2) for _ in range(world)], pair())),
        "all_reduce": ("allreduce", lambda: ([numbers(rank)],)),
        "all_reduce of two": ("allreduce", lambda: (pair(),)),
        "coalesced all_reduce": ("allreduce_coalesced", lambda: (pair(),)),
        "broadcast": ("broadcast", lambda: ([numbers(rank)],)),
        "gather": ("gather", lambda: ([] if rank else [zeros(world)], [numbers(rank)])),
        "scatter": ("scatter", lambda: (zeros(1), [] if rank else [pair()])),
        "all_to_all": ("alltoall", lambda: (zeros(world), pair())),
        "barrier": ("barrier", tuple),
    }

    def held(group: Any, method: str, arguments: Any) -> Any:
        return getattr(group, method)(*arguments()).get_future().wait()

    with both(world) as groups:
        return {
            name: [outcome(lambda g, of=of: held(g, *of), group) for group in groups.values()]
            for name, of in calls.items()
        }


def test_futures_hold_what_gloos_hold(workers: Workers) -> None:
    for outcomes in workers.run(futures, world=2):
        for name, (ours, gloos) in outcomes.items():
            if not gloo_lacks(gloos):
                assert gloos[0] == "value", name
                assert ours == gloos, name
