"""Starting a GPU kernel, or its interpretation, across JAX versions."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu


def launch(body, *, grid, out, scratch, interpret, written=()):
    """A kernel of one warpgroup per thread block, or its interpretation.

    Args:
      body: takes references to the operands, the outputs and the scratch.
      grid: the size of each named axis.
      out: the outputs' shapes.
      scratch: the shared memory.
      interpret: whether to interpret.
      written: which operands the body writes to, in place.

    Returns:
      A function of the operands that gives the outputs, and the written operands.
    """
    names, sizes = tuple(grid), tuple(grid.values())
    common = {
        "interpret": _interpreter() if interpret else None,
        "compiler_params": plgpu.CompilerParams(
            approx_math=True,  # exp to two units in the last place
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    }
    if written and jax.__version_info__ < (0, 12):
        # plgpu.kernel takes no references yet; core_map, public then, was deprecated
        # in 0.11.
        from jax._src.pallas.core import core_map

        mesh = plgpu.Mesh(grid=sizes, grid_names=names)

        def run_in_place(*operands):
            def run(refs):
                @core_map(mesh, **common)
                def _():
                    inputs, outputs = refs
                    pl.run_scoped(functools.partial(body, *inputs, *outputs), **scratch)

            empty = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), out)
            operands, outputs = pl.run_state(run)((operands, empty))
            return outputs, [operands[i] for i in written]

        return run_in_place

    kernel = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=sizes,
        grid_names=names,
        **common,
    )

    def run(*operands):
        refs = list(operands)
        for i in written:
            refs[i] = jax.new_ref(refs[i])
        outputs = kernel(*refs)
        return outputs, [jax.freeze(refs[i]) for i in written]

    return run


def _interpreter():
    """The interpreter's settings: past the end it reads NaN, where hardware reads 0."""
    if hasattr(plgpu, "InterpretGPUParams"):
        params = plgpu.InterpretGPUParams
    else:  # not public before JAX 0.12
        from jax._src.pallas.mosaic_gpu.interpret import params as private

        params = private.InterpretGPUParams
    return params(out_of_bounds_reads="uninitialized")
