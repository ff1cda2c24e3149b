"""Mutations that the tests of examples/methods must notice: see tests/mutate.py."""

from mutate import Mutation

MUTATIONS = [
    Mutation(
        "Langevin noise that forgets the privacy noise",
        "DPSGLD._move",
        "min(private, self.step_size) * prepared.seen.double()",
        "0.0 * prepared.seen.double()",
        "test_dpsgld.py",
    ),
    Mutation(
        "privacy noise assumed where records see nothing",
        "DPSGLD._move",
        "* prepared.seen.double()",
        "* (prepared.seen | True).double()",
        "test_dpsgld.py",
    ),
    Mutation(
        "privacy noise of another rate in the Langevin step",
        "DPSGLD._move",
        " / prepared.sampler.sample_rate",
        "",
        "test_dpsgld.py",
    ),
    Mutation(
        "rows of DPEM beyond the radius",
        "DPEM._moments",
        "clipped_rows(x.double(), self.radius)",
        "x.double()",
        "test_dpem.py",
    ),
    Mutation(
        "second moments with the bound of the rows",
        "DPEM._blocks",
        "(1.0, self.radius, self.radius**2)",
        "(1.0, self.radius, self.radius)",
        "test_dpem.py",
    ),
    Mutation(
        "a component made of noise moves",
        "DPEM._maximise",
        "found = counts > 2 * noise_of_counts",
        "found = counts > -math.inf",
        "test_dpem.py",
    ),
    Mutation(
        "covariances that noise alone could explain",
        "DPEM._maximise",
        "noise_radius(noise_of_squares, dim)",
        "0.0 * noise_of_squares",
        "test_dpem.py",
    ),
]
