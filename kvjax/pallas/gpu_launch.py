"""Starting a GPU kernel, or its interpretation, across JAX versions."""

import jax.experimental.pallas.mosaic_gpu as plgpu


def launch(body, *, grid, out, scratch, interpret):
    """Returns a kernel of one warpgroup per thread block, or its interpretation.

    Args:
      body: takes references to the operands, the outputs and the scratch.
      grid: the size of each named axis.
      out: the outputs' shapes.
      scratch: the shared memory.
      interpret: whether to interpret.

    Returns:
      A function of the operands that gives the outputs.
    """
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        interpret=_interpreter() if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # exp to two units in the last place
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )


def _interpreter():
    """Returns interpreter settings: reads past the end are NaN (hardware: 0)."""
    if hasattr(plgpu, "InterpretGPUParams"):
        params = plgpu.InterpretGPUParams
    else:  # not public before JAX 0.12
        from jax._src.pallas.mosaic_gpu.interpret import params as private

        params = private.InterpretGPUParams
    return params(out_of_bounds_reads="uninitialized")
