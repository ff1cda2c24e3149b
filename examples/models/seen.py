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
        "All intervals cover the truth. `DPSVI` and `DPSEP` make the same looks here, so their "
        "fits agree. At epsilon = 1 intervals are wider, since they count the noise in.",
        "Intervals of two slopes, five fits each: all of them cover the truth, and the private "
        "ones at epsilon 1 are the widest.",
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
        "Thirteen numbers make up for each other, the length scale among them. At epsilon = 1 "
        "the band of `DPSVI` is wider, and lies beside the truth at the first trough: `DPSEP` is "
        "139 nats above it. At epsilon = 4 hardly a difference can be seen, though there is one "
        "of 21 nats.",
        "Five bands around a sine, one for each fit: all but one follow it; the band of DPSVI at "
        "epsilon 1 is the widest, and too low at the first trough.",
    ),
    "baseball": Seen(
        "The mean of all players is the same in all fits. `DPSVI` has their spread somewhat too "
        "wide even without noise. Each player's own chance has parameters of its own, which move "
        "only in the steps that sample the player, a fifth of 1,000. `SVI` moves them 2,000 "
        "times. Noise adds little to that.",
        "Densities of the chance of a hit among players: that of SVI is nearest to the truth; the "
        "private ones and the one without noise agree with each other, and are a little wider.",
    ),
    "eight_schools": Seen(
        "As with baseball, the fits without noise and at epsilon = 4 agree. At epsilon = 1 the "
        "mean is further off. The guide knows no covariances, so its intervals are narrower than "
        "the posterior, with `SVI`, too: the truth of the mean is outside of all.",
        "Intervals of mean and spread of the schools' effects: for the mean all lie below the "
        "truth, that at epsilon 1 furthest; for the spread all are near it.",
    ),
    "gaussian_mixture": Seen(
        "`SVI` and both private fits find both humps, and `posterior()` has intervals for the two "
        "means. Without noise `DPSVI` takes gradient steps. They end in another mode, one wide "
        "component for both kinds. A mixture has several optima. The tutorial chooses among a "
        "hundred starts, which looks at the data a hundred times.",
        "A histogram with two humps: SVI and the private fits follow it; the fit without noise is "
        "a single wide hump over both.",
    ),
    "dirichlet_process": Seen(
        "This one gets only halfway to the outer clouds, without noise, too. "
        "Each point's cluster is drawn, not summed out. Its probabilities move by the "
        "score of that draw, and only in steps that sample the point. `SVI` gets there by "
        "2,000 moves of all points. The Gaussian mixture above sums clusters out, and has no such "
        "trouble.",
        "Points in three clouds and the centres found: SVI has centres in all three; without "
        "noise and with it some centres are on their way to the outer clouds.",
    ),
    "hidden_markov": Seen(
        "`SVI` ends where three chords are one, and so does `DPSVI` without noise and at epsilon "
        "= 4. At epsilon = 1 it ends nearer to the truth, 2,300 nats higher. That is no merit of "
        "noise: there are many optima, and luck decides. None of the fits has all four chords. "
        "Read the ELBO with care here: the guide holds points, and the prior's density has no "
        "bound where a chord is left without tones.",
        "Tables of chords by tones in grey: the truth has four tones on a diagonal; SVI and the "
        "fits without noise and at epsilon 4 have one of them and three in one row, that at "
        "epsilon 1 has two of them and the others in one row.",
    ),
    "prodlda": Seen(
        "At epsilon = 4 the three topics have their words, the third less clearly. At epsilon = "
        "1 two of them cannot be told apart. The networks have 546 weights, and the steps of all "
        "of them are noisy. For topics there is a model of `VIPS`, too, which has no networks.",
        "Tables of topics by words in grey: three dark blocks in the truth, with SVI and without "
        "noise, paler at epsilon 4; at epsilon 1 the first two topics are alike.",
    ),
    "vae": Seen(
        "Without noise the swap costs 580 nats of 43,000. 1,797 digits are few for networks of "
        "9,000 weights: at epsilon = 4 strokes are blurred, at epsilon = 1 only grains are left. "
        "With an optimizer of your own a network takes its steps as they are; left out, they "
        "fall, and epsilon = 1 reaches -61,500 in place of -95,900. More records help most: the "
        "noise in a sum is the same for 1,797 and for 70,000.",
        "Rows of drawn digits: those of SVI and without noise look alike, those at epsilon 4 "
        "are blurred, those at epsilon 1 are grains.",
    ),
}
