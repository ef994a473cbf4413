"""A traced program as the operations that one device runs, in order, and which of them need a buffer.

XLA makes one kernel of chains of elementwise operations: only what a matrix product, a collective, a loop or the
program's result reads has to be in memory. What is said here holds for its compilers for GPUs and TPUs alike; where
they differ, `platform` decides.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .cuts import Cuts
from .deferring import defer
from .jaxprs import subjaxprs
from .kernels import transposed, write_exponentials, writes_exponentials
from .local_sizes import cuts_of, local_bytes, spec_cuts, typed_cuts, whole
from .operations import (
    Loop,
    Op,
    branch_of,
    gather_once,
    holds_layers,
    is_fill,
    label_of,
    may_be_cut,
    merges,
    origin,
    platform_index,
    recut,
    root_of,
)

_CALLS = {"pjit", "jit", "closed_call", "core_call", "call", "remat", "remat2", "checkpoint", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr", "core_closed_call", "custom_lin", "run_state"}  # fmt: skip
# The same elements in the same place, under another name or shape.
_ALIASES = {"name", "copy_p", "optimization_barrier", "mesh_cast", "reshard", "pvary", "pbroadcast", "pcast", "reshape",
            "squeeze", "expand_dims", "stop_gradient", "transpose", "rev", "bitcast_convert_type"}  # fmt: skip
# Filled from nothing: made wherever it is read.
_FILLS = {"iota", "empty", "empty2", "create_token", "axis_index", "platform_index"}
# What a kernel writes to memory, and reads from there.
_HARD = {"dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated", "sort", "top_k", "approx_top_k",
         "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "fft", "cholesky", "triangular_solve", "eigh", "qr",
         "random_bits", "threefry2x32", "rng_bit_generator", "pallas_call", "custom_call", "ffi_call", "pure_callback",
         "custom_partitioning", "select_and_scatter_add", "reduce_window_sum", "reduce_window_max"}  # fmt: skip
_COLLECTIVES = {"all_gather", "all_to_all", "ragged_all_to_all", "psum", "psum2", "psum_invariant", "psum_scatter",
                "reduce_scatter", "ppermute", "pmax", "pmin", "all_gather_invariant", "all_gather_reduced",
                "unreduced_psum", "unreduced_psum_scatter", "collective_permute"}  # fmt: skip
_IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul",
             "scatter_min", "scatter_max", "scatter-sub"}  # fmt: skip


class Buffers:
    """The operations of a whole program, `ops`, in their order; `arguments` and `results` among them."""

    def __init__(
        self,
        closed: Any,
        shardings: Sequence[Any],
        platform: str,
        capability: tuple[int, int] | None = None,
        spread: bool = False,
    ):
        self.platform, self.capability, self.spread = platform, capability, spread
        self.ops: list[Op] = []
        self._loops: tuple[Loop, ...] = ()
        self._manual = False  # whether shapes are those of one device's part
        jaxpr = closed.jaxpr
        shardings = [*shardings, *[None] * (len(jaxpr.invars) - len(shardings))]
        self.arguments = [self._argument(v.aval, s) for v, s in zip(jaxpr.invars, shardings, strict=True)]
        consts = [self._op("constant", v.aval, whole(v.aval)) for v in jaxpr.constvars]
        outputs = self._run(jaxpr, consts, self.arguments, "")
        if platform == "tpu":
            gather_once(self.ops)
        else:
            self.ops = defer(self.ops)
        if writes_exponentials(capability):
            write_exponentials(self.ops)
        self.results = [self._op("result", op.aval, op.cuts, (op,)) for op in outputs]

    def _argument(self, aval: Any, sharding: Any) -> Op:
        cuts = spec_cuts(getattr(sharding, "mesh", None), getattr(sharding, "spec", None), len(whole(aval)))
        op = self._op("argument", aval, cuts if sharding is not None else typed_cuts(aval) or cuts)
        op.host = op.host or getattr(sharding, "memory_kind", None) == "pinned_host"
        return op

    def _op(self, kind: str, aval: Any, cuts: Cuts, inputs: tuple[Op, ...] = (), name: str = "", stack: str = "") -> Op:
        host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        size = local_bytes(aval, cuts) if hasattr(aval, "shape") else 0
        op = Op(kind, size, inputs, name, stack, "", len(self.ops), self._loops, host, cuts=cuts, aval=aval)
        self.ops.append(op)
        return op

    def _run(self, jaxpr: Any, consts: Sequence[Op], inputs: Sequence[Op], stack: str) -> list[Op]:
        env: dict[Any, Op] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(atom: Any) -> Op:
            return self._op("constant", atom.aval, whole(atom.aval)) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            inner = str(eqn.source_info.name_stack)
            outputs = self._eqn(eqn, values, f"{stack}/{inner}" if stack and inner else stack or inner)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _eqn(self, eqn: Any, values: list[Op], stack: str) -> list[Op]:
        name = eqn.primitive.name
        subs = list(subjaxprs(eqn))
        if name in _CALLS and subs and len(subs[0].invars) == len(values):
            return self._run(subs[0], self._consts(subs[0]), values, stack)
        if name == "scan":
            return self._scan(eqn, subs[0], values, stack)
        if name == "while":
            return self._while(eqn, values, stack)
        if name == "cond":
            return self._cond(eqn, subs, values, stack)
        if name == "shard_map" and len(subs) == 1 and len(subs[0].invars) == len(values):
            return self._shard_map(eqn, subs[0], values, stack)
        return self._plain(eqn, name, values, stack)

    def _consts(self, jaxpr: Any) -> list[Op]:
        return [self._op("constant", v.aval, whole(v.aval)) for v in jaxpr.constvars]

    def _plain(self, eqn: Any, name: str, values: list[Op], stack: str) -> list[Op]:
        cuts = cuts_of(eqn, [value.cuts for value in values])
        kind = self._kind(eqn, name, values, cuts)
        if name == "name":
            for loop in self._loops:
                loop.names.add(eqn.params["name"])
        if name == "dot_general" and self.platform != "tpu" and (again := transposed(eqn, values)) is not None:
            copy = self._op("hard", again.aval, again.cuts, (again,), "transpose", stack)
            values = [copy if value is again else value for value in values]
        inputs = tuple(values)
        if kind == "collective" and name == "sharding_constraint" and is_fill(values[0]):
            kind = "fused"  # filled in as it is cut
        if kind == "fused" and cuts:
            for value in values:
                if len(value.cuts) == len(cuts[0]):
                    recut(value, cuts[0])
        outputs = [self._op(kind, var.aval, c, inputs, name, stack) for var, c in zip(eqn.outvars, cuts, strict=True)]
        if name == "dot_general":
            outputs[0].merged = merges(eqn, *values[:2])
            outputs[0].partial = max(values[0].cuts[i] for i in eqn.params["dimension_numbers"][0][0] or [0]) > 1
        if name == "name":
            outputs[0].label = eqn.params["name"]
        if name == "platform_index":
            outputs[0].branch = platform_index(eqn.params["platforms"], self.platform)
        return outputs

    @staticmethod
    def _kind(eqn: Any, name: str, values: list[Op], cuts: list[Cuts]) -> str:
        if name in _FILLS:
            return "constant"
        if name == "sharding_constraint":
            return "alias" if values[0].cuts == cuts[0] else "collective"
        if name == "device_put":
            moved = getattr(eqn.outvars[0].aval, "memory_space", None) != getattr(values[0].aval, "memory_space", None)
            return "copy" if moved else "alias"
        if name in _ALIASES:
            return "alias"
        if name in _COLLECTIVES:
            return "collective"
        if name in _IN_PLACE:
            return "in place"
        if name in _HARD:
            return "hard"
        if name.startswith(("reduce_", "argm")) and name != "reduce_precision":
            return "reduce"
        if any(True for _ in subjaxprs(eqn)):
            return "hard"
        return "fused"

    def _scan(self, eqn: Any, body: Any, values: list[Op], stack: str) -> list[Op]:
        whole_in = [len(o.aval.shape) == len(b.aval.shape) for o, b in zip(eqn.invars, body.invars, strict=True)]
        num_carry = sum(len(o.aval.shape) == len(b.aval.shape) for o, b in zip(eqn.outvars, body.outvars, strict=True))
        num_consts = sum(whole_in) - num_carry
        consts = list(values[:num_consts])
        carries, xs = values[num_consts : num_consts + num_carry], values[num_consts + num_carry :]
        slices = [v.aval for v in body.invars[num_consts + num_carry :]]
        cuts = self._settled(body, consts, carries, xs, slices, stack)
        return self._loop(eqn, body, consts, carries, xs, slices, cuts, int(eqn.params["length"]), stack)

    def _settled(
        self, body: Any, consts: list[Op], carries: list[Op], xs: list[Op], slices: list[Any], stack: str
    ) -> list[Cuts]:
        """Cuts of a loop's carries: as they begin, or as a step leaves them where it cuts them further."""
        cuts = [op.cuts for op in carries]
        if self._manual or not any(may_be_cut(op) for op in carries):
            return cuts
        mark = len(self.ops)
        inner = [self._op("constant", op.aval, c) for op, c in zip(carries, cuts, strict=True)]
        pieces = [self._op("constant", aval, x.cuts[1:]) for x, aval in zip(xs, slices, strict=True)]
        outs = self._run(body, self._consts(body), [*consts, *inner, *pieces], stack)
        del self.ops[mark:]
        return [
            tuple(map(max, mine, out.cuts)) if may_be_cut(op) else mine
            for op, mine, out in zip(carries, cuts, outs, strict=False)
        ]

    def _loop(
        self, eqn: Any, body: Any, consts: list[Op], carries: list[Op], xs: list[Op], slices: list[Any],
        cuts: list[Cuts], length: int, stack: str,
    ) -> list[Op]:  # fmt: skip
        free = all(loop.holds for loop in self._loops)  # not inside a loop over layers
        if self.platform != "tpu":
            consts = [self._laid_out(op, stack) for op in consts]
        for op in (*consts, *xs):
            self._op("need", op.aval, op.cuts, (op,))
        loop = Loop(length=length, stack=stack, kept={op.label for op in map(origin, xs) if op.kind == "stack"} - {""})
        for op, c in zip(carries, cuts, strict=True):
            recut(op, c)
        loop.fetches = any(op.host and op.kind == "stack" for op in map(origin, xs))
        begun = [self._op("carry", op.aval, c, (op,), "carry", stack) for op, c in zip(carries, cuts, strict=True)]
        stacked = [self._op("stack", v.aval, whole(v.aval), (), "stack", stack) for v in eqn.outvars[len(carries) :]]
        for op in (*begun, *stacked):
            op.loop = loop
        loop.holds = not stacked and holds_layers(body)
        ahead = self.platform != "tpu" and free and length > 1
        # What goes to the host is copied while the next step computes: then too the first step goes before the loop.
        loop.first = ahead and any(op.host for op in stacked)
        loop.begin = len(self.ops)
        outside, self._loops = self._loops, (*self._loops, loop)
        pieces = [self._op("fused", aval, x.cuts[1:], (x,), "slice", stack) for x, aval in zip(xs, slices, strict=True)]
        outs = self._run(body, self._consts(body), [*consts, *begun, *pieces], stack)
        for out, target in zip(outs, [*begun, *stacked], strict=True):
            self._op("yield", out.aval, out.cuts, (out,)).target = target
            if target.kind == "stack":
                target.cuts, target.label = (1, *out.cuts), label_of(out)
                target.bytes = local_bytes(target.aval, target.cuts)
        loop.end = len(self.ops)
        self._loops = outside
        self._op("need", None, ())  # so that what ends with the loop ends inside it
        if ahead and loop.fetches:
            begun = self._last_step(loop, body, consts, begun, xs, slices, stacked, stack)
        return [*begun, *stacked]

    def _laid_out(self, op: Op, stack: str) -> Op:
        """What a loop's steps read in another layout than it has: the loop is given it transposed.

        A parameter that steps gather along its last dimension: XLA for GPUs gathers along the first. And what was
        gathered along another dimension than the first, of which steps take slices, such as experts' weights.
        """
        root = root_of(op)
        turned = op.kind == "argument" and not self._loops and len(op.cuts) > 1 and op.cuts[-1] > 1 and not op.host
        if root.kind == "collective" and len(root.cuts) > 2 and root.loops == self._loops:
            before = root.inputs[0].cuts
            whole_rows = len(before) == len(root.cuts) and before[0] == root.cuts[0]
            turned = whole_rows and root.bytes > root.inputs[0].bytes
        return self._op("hard", op.aval, op.cuts, (op,), "transpose", stack) if turned else op

    def _last_step(
        self, loop: Loop, body: Any, consts: list[Op], carries: list[Op], xs: list[Op], slices: list[Any],
        stacked: list[Op], stack: str,
    ) -> list[Op]:  # fmt: skip
        """The last step of a loop that fetches the next step's values from the host: there is no next one for it."""
        mark = len(self.ops)
        pieces = [self._op("fused", aval, x.cuts[1:], (x,), "slice", stack) for x, aval in zip(xs, slices, strict=True)]
        outs = self._run(body, self._consts(body), [*consts, *carries, *pieces], stack)
        for op in self.ops[mark:]:
            op.outside, op.step_of = True, loop
        for out, target in zip(outs[len(carries) :], stacked, strict=True):
            self._op("yield", out.aval, out.cuts, (out,)).target = target
        return outs[: len(carries)]

    def _while(self, eqn: Any, values: list[Op], stack: str) -> list[Op]:
        test, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carries = values[first + second :]
        consts = values[first : first + second]
        cuts = self._settled(body, consts, carries, [], [], stack)
        outs = self._loop(eqn, body, consts, carries, [], [], cuts, 1, stack)
        self._run(test, self._consts(test), [*values[:first], *outs], stack)
        return outs

    def _cond(self, eqn: Any, subs: list[Any], values: list[Op], stack: str) -> list[Op]:
        index, operands = values[0], values[1:]
        chosen = branch_of(index)
        if chosen is not None:
            sub = subs[min(chosen, len(subs) - 1)]
            return self._run(sub, self._consts(sub), operands, stack)
        for op in operands:
            self._op("need", op.aval, op.cuts, (op,))
        branches = [self._run(sub, self._consts(sub), operands, stack) for sub in subs]
        results = []
        for var, *outs in zip(eqn.outvars, *branches, strict=True):
            cuts = tuple(map(min, *(out.cuts for out in outs))) if len(outs) > 1 else outs[0].cuts
            results.append(self._op("hard", var.aval, cuts, tuple(outs), "cond", stack))
        return results

    def _shard_map(self, eqn: Any, sub: Any, values: list[Op], stack: str) -> list[Op]:
        mesh = eqn.params["mesh"]
        manual = set(eqn.params.get("manual_axes", mesh.axis_names)) == set(mesh.axis_names)
        inner = []
        for value, var, spec in zip(values, sub.invars, eqn.params["in_specs"], strict=True):
            parts = spec_cuts(mesh, spec, len(value.cuts))
            # What isn't cut by the map itself may be cut over axes that it leaves alone.
            left = tuple(1 if manual else max(mine // part, 1) for mine, part in zip(value.cuts, parts, strict=True))
            size = local_bytes(var.aval, left)
            kind = "alias" if size == value.bytes else "collective" if size > value.bytes else "fused"
            if kind != "alias" and is_fill(value):
                kind = "fused"
            inner.append(self._op(kind, var.aval, left, (value,), "in", stack))
        before, self._manual = self._manual, manual
        outs = self._run(sub, self._consts(sub), inner, stack)
        self._manual = before
        results = []
        for out, var, spec in zip(outs, eqn.outvars, eqn.params["out_specs"], strict=True):
            parts = spec_cuts(mesh, spec, len(out.cuts))
            cuts = tuple(mine * part for mine, part in zip(out.cuts, parts, strict=True))
            results.append(self._op("alias", var.aval, cuts, (out,), "out", stack))
        return results
