"""Each example's results, in the order of the page, and its picture in words.

Both describe the rows and pictures that are kept. After a new run of an example, read them again.
"""

from typing import NamedTuple


class Seen(NamedTuple):
    sentences: str
    alt: str


SEEN = {
    "logistic_regression": Seen(
        "All private intervals lie on those of `SVI`. At epsilon = 1 some are wider, because they "
        "include the noise.",
        "Intervals of seven coefficients by five fits. Their centres nearly agree.",
    ),
    "linear_regression": Seen(
        "All intervals cover the truth. `DPSVI` and `DPSEP` make the same looks here, so their "
        "fits agree.",
        "Intervals of two slopes by five fits. All of them cover the truth.",
    ),
    "correlations": Seen(
        "At epsilon = 4 the intervals are those of `SVI`. At epsilon = 1 those of `DPSVI` are "
        "somewhat wider, and those of `DPSEP` are shifted.",
        "Intervals of six correlations by five fits. All but a few cover the truth.",
    ),
    "capture_recapture": Seen(
        "At epsilon = 1 less than a nat is lost. All five clouds contain the truth.",
        "Clouds of draws of two probabilities, which lie over each other.",
    ),
    "gaussian_process": Seen(
        "At epsilon = 1 the band of `DPSVI` misses the first trough, and `DPSEP` is 139 nats "
        "better. At epsilon = 4 the picture "
        "shows hardly a difference.",
        "Five bands around a sine. That of DPSVI at epsilon 1 is the widest.",
    ),
    "baseball": Seen(
        "All fits agree on the mean. With privacy, `DPSVI` integrates each player's chance out. "
        "Its spread is closest to the truth. `SVI` and the fit without noise take gradient steps.",
        "Densities of the chance of a hit among players. Those of the private fits are nearest to "
        "the truth.",
    ),
    "eight_schools": Seen(
        "With privacy, `DPSVI` integrates each school's effect out, and its spread is closest to "
        "the truth. All fits put the mean low, as these data do. The guide has no covariances. So "
        "the intervals of gradient steps are too narrow, those of `SVI` included.",
        "Intervals of mean and spread of the schools' effects. Those of the mean are low.",
    ),
    "gaussian_mixture": Seen(
        "`SVI` and both private fits find both humps, and `posterior()` has intervals for the two "
        "means. Without noise `DPSVI` takes gradient steps, which end in another optimum.",
        "A histogram with two humps. The fit without noise has one wide hump.",
    ),
    "dirichlet_process": Seen(
        "`DPSVI` gets only halfway to the outer clouds, even without noise. Each point's cluster "
        "is drawn, and its probabilities move only in steps that sample the point.",
        "Points in three clouds and the centres found. Only SVI has centres in all three.",
    ),
    "hidden_markov": Seen(
        "No fit has all four chords. There are many optima, and luck decides: at epsilon = 1 the "
        "fit is 2,300 nats better than that of `SVI`.",
        "Tables of chords by tones in grey. The truth has four tones on a diagonal, "
        "and the fits one or two.",
    ),
    "prodlda": Seen(
        "At epsilon = 4 the three topics have their words, the third less clearly. At epsilon = "
        "1 two of them look alike. `VIPS` has a model of topics without networks.",
        "Tables of topics by words in grey, with three dark blocks in the truth.",
    ),
    "vae": Seen(
        "1,797 digits are too few for networks of 9,000 weights. At epsilon = 4 strokes are "
        "blurred, and at epsilon = 1 only grains are left. More records help most.",
        "Rows of drawn digits, which are blurred at epsilon 4 and grains at epsilon 1.",
    ),
}
