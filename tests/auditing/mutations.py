"""What the tests of auditing must notice: see tests/mutate.py."""

from mutate import Mutation

MUTATIONS = [
    Mutation(
        "not private: said at each run of an audit",
        "audit",
        "                values.append(read(make_run(*worlds[int(each)])))\n",
        "                values.append(read(make_run(*worlds[int(each)])))\n"
        '                warn_not_private("audit", "data", _MADE_UP)\n',
        "test_looks.py",
    ),
    Mutation(
        "not private: said after the runs of an audit",
        "audit",
        '    warn_not_private("audit", "data", _MADE_UP)\n    worlds = ',
        '    make_run(*data)\n    warn_not_private("audit", "data", _MADE_UP)\n    worlds = ',
        "test_looks.py",
    ),
    Mutation(
        "audit: thresholds from the runs that are counted",
        "audit",
        "low, high = chosen_thresholds(held_out, chosen, delta, confidence)",
        "low, high = chosen_thresholds(tested, coins, delta, confidence)",
        "test_audit.py",
    ),
    Mutation(
        "audit: coins that are not fair",
        "audit",
        "coins = _generator(seed).integers(2, size=num_trials - part - learning) == 1",
        "coins = np.arange(num_trials - part - learning) % 3 == 1",
        "test_audit.py",
    ),
    Mutation(
        "audit: delta forgotten, repeated runs",
        "odds_limit",
        "(accuracy - delta / np.maximum(rate, 1e-100))",
        "accuracy",
        "test_bounds.py",
    ),
    Mutation(
        "audit: delta by the estimated rate of guesses",
        "odds_limit",
        "rate = rate_interval(guesses, trials, _RATE_SHARE * error)[0]",
        "rate = 2.0 * guesses / trials",
        "test_bounds.py",
    ),
    Mutation(
        "audit: accuracy without its limit",
        "odds_limit",
        "accuracy = rate_interval(correct, np.maximum(guesses, 1), (1.0 - _RATE_SHARE) * error)[0]",
        "accuracy = np.minimum(0.999, correct / np.maximum(guesses, 1))",
        "test_bounds.py",
    ),
    Mutation(
        "audit: delta forgotten, one run",
        "canaries_error",
        "guesses, q)) + excess",
        "guesses, q)) + 0.0 * excess",
        "test_bounds.py",
    ),
    Mutation(
        "audit: half of the delta term, one run",
        "canaries_error",
        "excess = canaries * delta",
        "excess = 0.5 * canaries * delta",
        "test_bounds.py",
    ),
    Mutation(
        "audit: one correct guess too many",
        "canaries_error",
        "binom.sf(correct - 1, guesses, q)",
        "binom.sf(correct, guesses, q)",
        "test_bounds.py",
    ),
    Mutation(
        "audit: limits of single points",
        "error_rates",
        "each = error / (4 * len(thresholds))",
        "each = 1e4 * error",
        "test_audit.py",
    ),
    Mutation(
        "audit: the canary stays in the data",
        "with_canaries",
        "column.clone() if isinstance(column, torch.Tensor) else column.copy()",
        "column",
        "test_audit.py",
    ),
]
