"""How a warpgroup holds tiles in registers: as results of wgmma, which are those of mma.sync too."""

from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = plgpu.Layout.WGMMA  # of a tile [rows, columns], rows a multiple of 64
PER_ROW, PER_COLUMN = TILE.reduce(1), TILE.reduce(0)
