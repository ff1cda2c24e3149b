"""What is seen in each example, in the order of the page, and its picture in words.

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
        "Intervals of seven coefficients by five fits. Their centres nearly agree, and those at "
        "epsilon 1 are a little wider.",
    ),
    "linear_regression": Seen(
        "All intervals cover the truth. `DPSVI` and `DPSEP` make the same looks here, so their "
        "fits agree.",
        "Intervals of two slopes, five fits each: all of them cover the truth, and the private "
        "ones at epsilon 1 are the widest.",
    ),
    "correlations": Seen(
        "At epsilon = 4 the intervals are those of `SVI`. At epsilon = 1 those of `DPSVI` are "
        "somewhat wider, and those of `DPSEP` are shifted.",
        "Intervals of six correlations, five fits each: all but a few cover the truth, and "
        "those at epsilon 1 are the widest.",
    ),
    "capture_recapture": Seen(
        "At epsilon = 1 less than a nat is lost. All five clouds hold the truth.",
        "Clouds of draws of two probabilities: all five lie over each other and over the truth.",
    ),
    "gaussian_process": Seen(
        "At epsilon = 1 the band of `DPSVI` misses the first trough, and `DPSEP` is 139 nats "
        "better. The thirteen latents can make up for each other. At epsilon = 4 the picture "
        "shows hardly a difference.",
        "Five bands around a sine, one for each fit. The band of DPSVI at epsilon 1 is the widest, "
        "and too low at the first trough.",
    ),
    "baseball": Seen(
        "All fits agree on the mean. `DPSVI` has a spread that is somewhat too wide, even without "
        "noise.",
        "Densities of the chance of a hit among players. That of SVI is nearest to the truth. The "
        "others agree with each other, and are a little wider.",
    ),
    "eight_schools": Seen(
        "The fits without noise and at epsilon = 4 agree. At epsilon = 1 the mean is further off. "
        "The guide has no covariances, so all intervals are too narrow, that of `SVI` included.",
        "Intervals of mean and spread of the schools' effects. For the mean all lie below the "
        "truth, that at epsilon 1 furthest. For the spread all are near it.",
    ),
    "gaussian_mixture": Seen(
        "`SVI` and both private fits find both humps, and `posterior()` has intervals for the two "
        "means. Without noise `DPSVI` takes gradient steps, which end in another optimum.",
        "A histogram with two humps: SVI and the private fits follow it; the fit without noise is "
        "a single wide hump over both.",
    ),
    "dirichlet_process": Seen(
        "`DPSVI` gets only halfway to the outer clouds, even without noise. Each point's cluster "
        "is drawn, and its probabilities move only in steps that sample the point.",
        "Points in three clouds and the centres found. SVI has centres in all three. Some centres "
        "of the other fits are between the clouds.",
    ),
    "hidden_markov": Seen(
        "No fit has all four chords. There are many optima, and luck decides: at epsilon = 1 the "
        "fit is 2,300 nats better than that of `SVI`. The guide holds points, and the ELBO has no "
        "bound if a chord is left without tones.",
        "Tables of chords by tones in grey. The truth has four tones on a diagonal. The fit at "
        "epsilon 1 has two of them, and the others have one. The rest is in one row.",
    ),
    "prodlda": Seen(
        "At epsilon = 4 the three topics have their words, the third less clearly. At epsilon = "
        "1 two of them look alike. `VIPS` has a model of topics without networks.",
        "Tables of topics by words in grey. The truth, SVI and the fit without noise have three "
        "dark blocks. They are paler at epsilon 4. At epsilon 1 the first two topics are alike.",
    ),
    "vae": Seen(
        "1,797 digits are too few for networks of 9,000 weights. At epsilon = 4 strokes are "
        "blurred, and at epsilon = 1 only grains are left. More records help most.",
        "Rows of drawn digits: those of SVI and without noise look alike, those at epsilon 4 "
        "are blurred, those at epsilon 1 are grains.",
    ),
}
