"""Every number that a step depends on and nobody gives, once: its meaning, and what it was measured on.

`docs/decisions.md` has the figures behind those that have a story.
"""

import math

KEEPS = 0.9  # of a running mean of sizes (inputs, gradients, signal, curvature), per step: forgotten in about ten
YOUNG = 10  # steps of a run that say little: no loss is wild yet, and signal is not told from noise
LONGEST = 20  # steps at most that things lie apart where nobody asks for more: updates of all rows, measurements

# bad batches (`natgrad.optim.guard`)
WARN, STOP = 5, 25  # steps in a row that came to nothing: of the warning, of the error
WILD = 10.0  # times the highest loss so far: no step of a sound run of the races raised it so far at once
FIRST_WILD = 1e4  # the same in a young run: first losses say little
HARDLY = 1e-6  # of the proposal: as good as nothing; no length that a loss allows comes near it in a run that learns
PATIENCE = 3  # batches in a row that are left out for their loss or inputs; the next one counts: the data have changed
FAR_INPUTS = 100.0  # times the mean square so far of a layer's inputs: one row of 64 that is eighty times too large
LONG_GRADIENT, KNOWN_AFTER = 3.0, 5  # times the root mean square of the gradients so far, known after so many steps
HEADROOM = 1e-6  # of the largest number of a dtype: sums of many second moments must not overflow
LONGEST_STEP = 1e12  # of a block, from where a metric means nothing: squares of more overflow in float32
COMPARED = 5  # losses of a model's own, with the criterion's: of a fresh model many have the same value
SMALL_RATE = 0.01  # a factor on a step's length that nobody means: Adam's rates are below it
RAISES = (1.0, 1e2, 1e4)  # times the damping, tried one after the other, where an inverse is not finite

# when statistics and inverses are due, and of how many rows (`natgrad.optim.block_step`)
RAMP = 5  # steps after which the intervals grow by one; 3 costs 11 % of a deep autoencoder's loss after 20 steps
TURNED = 2  # times as long they are once steps are spectral, which need whitened inputs alone
GOLDEN = (math.sqrt(5) - 1) / 2  # whose multiples keep intervals out of step with data that take turns
FEWEST_ROWS = 256  # of a pass that factors are taken from, if there are as many, however often passes are read
ROWS = 4  # of a pass that a factor is taken from, for each of its own
JUDGED_EVERY = 5  # steps between judgements of the damping: Martens & Grosse 2015, section 6.5

# what K-FAC's inverses are held as (`natgrad.operators.kronecker`): of 785 rows beside 128 an inverse costs 5.3 ms of
# 9.4 and of 1569 beside 10 34 of 56; a solve in the place of a product with it .3 and 1.8 ms more, one thread
SOLVED_ROWS, SOLVED_RATIO = 512, 4  # of a factor that is kept as its Cholesky root, and times the other's rows

# how far the quadratic model is trusted (`natgrad.optim.block_step`)
BEFORE = 2  # a measurement waits for as many steps as a run has had, over this
FEWEST_EXAMPLES, EXAMPLES_PART = 64, 4  # of a measurement, if the pass has as many; of a larger one, one in so many
FALLS_TO = 0.5  # that the ratio falls to, per measurement: a few examples carry the metric of a net that is right
LARGEST_RATIO = 1e8  # that a measurement gives
UNKNOWN = 30.0  # times too small that the estimate of a step's KL may be, before any was compared
MARGIN = 5.0  # of the largest factor by which it was too small lately
MARGIN_KEEPS = 0.98  # of that factor, per comparison
BLIND = 1e6  # the same of statistics without derivatives: a bound on the KL that is set then is measured
KL_SLACK = 0.02  # of a bound on the KL that is left over: a measurement is a difference of outputs
RADIUS_SLACK = 0.001  # of a radius that is left over: another order of a sum finds the KL within it too
SAME_LOSS = 1e-6  # share of a loss by which it may rise: round-off in float32
AT_ONCE = 50  # examples of which the first step of `OnlineRadius` may have its whole length
FEW_PASSES = 1.5  # over few rows, from which on the bound of `OnlineRadius` falls

# errors of a regression, losses that the metric does not know (`natgrad.optim.state`)
STANDARD = 2.0  # standard deviations of the likelihood that errors have where targets are in units of their own
UNKNOWN_SHARE = 0.1  # of a block's gradient, that counts as a part: round-off in half precision stays below
ROUND_OFF = 0.004  # of the whole gradient, below which a zero may be round-off: 2^-8 in bfloat16

# trial points (`natgrad.optim.objective`)
SCALER = 128.0  # weights of losses from here on come from a gradient scaler, whose factor gradients have no longer
TOO_FAR, TRIALS = 10.0, 3  # times as far as was known: another trial, nearer; of so many
DRAWS = 32  # of labels, for a likelihood without a Fisher form

# spectral steps (`natgrad.rules.spectral_progress`, `natgrad.rules.spectral_descent`)
FALLS_AFTER = 20.0  # steps from which on the rate falls with `rate="auto"`
FRESH = 0.5  # size of a fresh layer per root of an output
PROGRESS_FORGETS = 0.2  # of the mean square of a layer's progress, per step
FARTHEST = 1e6  # times its slope before that a slope after a step counts: squares stay finite
TINY = 1e-30  # stands for zero where something is divided by it
ITERATIONS = 5  # of the polar factor: singular values between .87 and 1.13; an inverse takes their place on a CPU
# sides from which on a part of the directions is enough for a whitener, with fewer rows than inputs, and a polar factor
# serves two steps: a fifth less time on 784-512-512-10 with 64 rows, a quarter on a variational autoencoder of 400
WIDE = 256
INPUTS_PER_DIRECTION, DIRECTIONS_PER_ROW = 12, 2  # of that part, and at most of a step's rows
WIDEST = 1024  # the most rows or columns, whichever are fewer, of a table without a layer that gets a polar factor
MOMENTS = 2**24  # numbers of layers' second moments that are factored at once: 64 MB of memory in float32
KEPT_DIRECTIONS = 8  # steps that a direction is kept for at most
