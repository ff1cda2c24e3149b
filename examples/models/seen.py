"""What is seen in each example, in the order of the page, and its picture in words.

Both are of the rows and pictures that are kept: who runs an example anew reads them anew.
"""

from typing import NamedTuple


class Seen(NamedTuple):
    sentences: str
    alt: str


SEEN = {
    "logistic_regression": Seen(
        "All private intervals lie on those of `SVI`. At epsilon = 1 some are wider, since "
        "they count the noise in. With 6,366 women and seven coefficients there is little "
        "that noise could hide.",
        "Intervals of seven coefficients, five fits each: their centres nearly agree, and the "
        "private ones at epsilon 1 are a little wider than those of SVI.",
    ),
    "linear_regression": Seen(
        "`DPSVI` does not arrive, not even without noise, and says so by a "
        "`ConvergenceWarning`: an intercept of 9 is far from where it starts, and ruggedness "
        "from 0 to 6 ties the intercepts to the slopes. Its intervals are narrow, and not to "
        "be believed. `DPSEP`, which is for regressions, is where `SVI` is, at epsilon = 1. "
        "Public numbers help, too: with `ruggedness / 6` and `log_gdp - 8` `DPSVI` without "
        "noise arrives.",
        "Intervals of two slopes: SVI and DPSEP lie on the truth, and the three fits by DPSVI "
        "are far from it, in narrow intervals.",
    ),
    "correlations": Seen(
        "Four variances and six correlations, for which the Gaussian guide is a good one: at "
        "epsilon = 1 intervals are somewhat wider, by `DPSVI`, or somewhat beside, by "
        "`DPSEP`; at epsilon = 4 they are those of `SVI`.",
        "Intervals of six correlations, five fits each: all but a few cover the truth, and "
        "those at epsilon 1 are the widest.",
    ),
    "capture_recapture": Seen(
        "Two chances, and what may have happened to each animal is summed out: at epsilon = 1 "
        "less than a nat is lost, and all five clouds have the truth in them.",
        "Clouds of draws of two probabilities: all five lie over each other and over the truth.",
    ),
    "gaussian_process": Seen(
        "Thirteen numbers that make up for each other, the length scale among them: at "
        "epsilon = 1 the band of `DPSVI` is wider, most of all at the peaks and the right "
        "end, and `DPSEP`, whose band is narrower, is 39 nats above it. At epsilon = 4 no "
        "difference can be seen, though there is one of 11 nats.",
        "Five bands around a sine, one for each fit: all follow it; the band of DPSVI at "
        "epsilon 1 is the widest, at the peaks and at the right end.",
    ),
    "baseball": Seen(
        "The mean of all players is the same in all fits. Their spread is not: `DPSVI` has it "
        "too wide even without noise, since each player's own chance has parameters of its "
        "own, and these move only in the steps in which the player takes part, a fifth of "
        "1,000, where `SVI` moves them 2,000 times. With 4,000 steps 58 of the 84 nats are "
        "left. Noise adds little to that.",
        "Densities of the chance of a hit among players: that of SVI is near the truth; the "
        "private ones and the one without noise agree with each other, and are lower and "
        "wider.",
    ),
    "eight_schools": Seen(
        "As with baseball, but less: 47 nats, the same with noise and without. Rows of the "
        "schools had 200 moves each; with 4,000 steps in place of 1,000 there were 32 nats "
        "left. The guide knows no covariances: its intervals, those of `SVI`, too, are "
        "narrower than the posterior, and for the mean the truth is outside of all.",
        "Intervals of mean and spread of the schools' effects: those of the private fits "
        "overlap with those of SVI; for the mean all lie below the truth.",
    ),
    "gaussian_mixture": Seen(
        "At epsilon = 1 there is nothing to see: 2 nats. The fit without noise ended in "
        "another mode, one wide component for both kinds. That is luck, in both directions: a "
        "mixture has more than one optimum, and who may look at the data once cannot choose "
        "among a hundred starts, as the tutorial does.",
        "A histogram with two humps: SVI and the private fits follow it; the fit without "
        "noise is a single wide hump over both.",
    ),
    "dirichlet_process": Seen(
        "This one fails, without noise, too: the points outside of the middle are not found. "
        "Each point's cluster is drawn, not summed out, and its probabilities move by the "
        "score of that draw, in the steps in which the point takes part. `SVI` gets there by "
        "2,000 moves of all points. Noise is not what hurts; the Gaussian mixture above, "
        "which sums clusters out, has no such trouble.",
        "Points in three clouds and the centres found: SVI has centres in all three; without "
        "noise and with it all centres stay in the cloud in the middle.",
    ),
    "hidden_markov": Seen(
        "`SVI` ends, from both step sizes, where three chords are one, and so does `DPSVI` "
        "without noise; with noise it ends elsewhere, at epsilon = 4 nearer to the truth and "
        "2,400 nats higher. That is no merit of noise: there are many optima, and each is met "
        "by luck. None of the fits has all four chords. The ELBO is to be read with care "
        "here, since the guide holds points, and the prior's density has no bound where a "
        "chord is left without tones.",
        "Tables of chords by tones in grey: the truth has four tones on a diagonal; SVI and "
        "the fit without noise have one of them and three in one row, those at epsilon 4 and "
        "1 have two of them and the others in one row.",
    ),
    "prodlda": Seen(
        "At epsilon = 4 the three topics have their words. At epsilon = 1 two of them could "
        "not be told apart: the networks have 546 weights, and the steps of all of them are "
        "noisy. For topics there is a model of `VIPS`, too, which has no networks.",
        "Tables of topics by words in grey: three dark blocks in the truth, with SVI, without "
        "noise and at epsilon 4; at epsilon 1 the first two topics are alike.",
    ),
    "vae": Seen(
        "Without noise the swap costs 13 nats of 44,000. 1,797 digits are few for networks of "
        "9,000 weights: at epsilon = 4 strokes are blurred, at epsilon = 1 they dissolve. "
        "What helps is more records: the noise in a sum is the same for 1,797 and for 70,000.",
        "Rows of drawn digits: those of SVI and without noise look alike, those at epsilon 4 "
        "are blurred, those at epsilon 1 are grains.",
    ),
}
