"""What the tests of baselines must notice: see tests/mutate.py."""

from mutate import Mutation

MUTATIONS = [
    Mutation(
        "Langevin noise that forgets the privacy noise",
        "DPSGLD._move",
        "missing = step_size - min(private, step_size) * prepared.seen.double()",
        "missing = step_size - 0.0 * prepared.seen.double()",
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
    Mutation(
        "door: EP that no ledger knows of",
        "EP.run",
        "        mark_look(self.accountant,",
        "        mark_look(PrivacyAccountant(),",
        "test_ep.py",
    ),
    Mutation(
        "door: EP marks the ledger after it has read",
        "EP.run",
        "        mark_look(self.accountant,",
        "        one = torch.zeros(1), torch.zeros(1, 1)\n"
        "        _cavities(Gaussian(torch.zeros(1), torch.eye(1)), "
        "Gaussian(one[1], one[1][None]), torch.tensor([0]))\n"
        "        mark_look(self.accountant,",
        "test_ep.py",
    ),
    Mutation(
        "door: EP without an accountant",
        "EP.__init__",
        "if not isinstance(accountant, PrivacyAccountant):",
        "if False:",
        "test_ep.py",
    ),
]
