"""Write the slides of the first lesson, docs/slides.pdf: `make slides`.

Pictures and numbers come from the notebooks, which are executed and committed.
"""

import base64
import io
import json
from pathlib import Path
from typing import NamedTuple

import matplotlib.image
import matplotlib.pyplot as plt
from matplotlib.backends.backend_pdf import PdfPages

DOCS = Path(__file__).parent
BLUE, BLACK, GREY = "#0072B2", "#222222", "#666666"


class Slide(NamedTuple):
    title: str
    text: str = ""
    code: str = ""
    picture: tuple[str, int] | None = None  # a notebook, and which of its pictures
    note: str = ""  # for the speaker: an annotation of the PDF, outside the page


DECK = (
    Slide(
        "Private Bayesian inference",
        "A first lesson of two hours\n\n\nNumbers and pictures come from the course's notebooks.",
        note="Ask how many have used Pyro, and how many have heard of differential privacy.",
    ),
    Slide(
        "Two questions",
        "A clinic has 442 patients. It answers questions about sums,\n"
        "but only if at least 400 patients are in them.\n\n"
        "Progression of the disease, all patients:   67,243\n"
        "All with a body mass index of 42 or less:  67,001\n\n"
        "Alice says that her body mass index is above 42.\n\n"
        "How ill is she? Is an answer about 400 people safe?",
        note="Let everybody vote on both questions before the next slide.",
    ),
    Slide(
        "Differencing",
        "67,243 − 67,001 = 242\n\n"
        "Alice is the only patient with such an index. So 242 is her value.\n\n"
        "Each answer is about hundreds of patients.\nTogether they are about one.\n\n"
        "No minimum group size prevents this.",
        note="Do the subtraction at the board. Ask for a rule that would have stopped it.",
    ),
    Slide(
        "Two posteriors",
        "The clinic publishes a Bayesian linear regression on ten facts:\n"
        "means and covariances. On Monday without Alice, on Tuesday with her.\n\n"
        "What do both reveal about her ten facts and her outcome?\n\n"
        "1.  Nothing\n2.  Her outcome, roughly\n3.  All eleven numbers",
        note="Take a vote by hands. Most people choose 1 or 2.",
    ),
    Slide(
        "All eleven, to the last digit",
        "The posterior is a function of sums over patients. Sums can be subtracted.",
        "               stolen     true\n"
        "         bmi:    42.20    42.20\n"
        "          bp:    99.00    99.00\n"
        "          s5:     5.01     5.01\n"
        " progression:   242.00   242.00",
        note="The answer is 3. Sums of products hide nothing from somebody who has the rest.",
    ),
    Slide(
        "One posterior",
        "A pilot study of 100 patients fits 65 coefficients with SVI.\n"
        "It publishes one posterior, once. Nothing can be subtracted.\n\n"
        "An attacker has the data of one person, and asks:\nwas this person in the study?\n\n"
        "The attack accepts 10 false accusations among 100 others.\n"
        "How many of 100 members will it find: 10, 20 or 50?",
        note="Collect bets. Stress that there is nothing to subtract.",
    ),
    Slide(
        "Members fit better",
        "The attack finds 19 of 100 members.\n"
        "In 200 such studies with exact posteriors, it finds 24% on average.",
        picture=("0_what_leaks", 0),
        note="10% would be guessing. The curve shows every threshold, not only this one.",
    ),
    Slide(
        "Is such an attacker realistic?",
        "Models are refitted every week, and cohorts overlap.\n\n"
        "People know themselves, their relatives and their colleagues.\n\n"
        "Nobody can predict what an attacker will have in ten years.\n\n"
        "So the guarantee must hold even against an attacker who has all other records.",
        note="Ask for an attacker from the audience's own field.",
    ),
    Slide(
        "Noise in proportion to one person",
        "A value above 350 counts as 350. So one patient adds at most 350 to a sum.\n\n"
        "The clinic adds Gaussian noise to both answers.\n"
        "Its standard deviation is 5.28 × 350, for epsilon = 1.\n\n"
        "How far off will the mean of the 442 patients be?\n\n"
        "And Alice's value, by differencing?",
        note="Ask for both guesses. The noise does not depend on the number of patients.",
    ),
    Slide(
        "The mean is off by 4.2, Alice's value by 2,628",
        "Noise in proportion to one person hides that person.\n"
        "It hardly changes what is true of hundreds.",
        picture=("0_what_leaks", 1),
        note="Both numbers come from the same noise. Only the question differs.",
    ),
    Slide(
        "Differential privacy",
        "For any set A of results, with or without one record:\n\n\n"
        "        $P(A \\mid \\mathrm{with}) \\leq e^{\\varepsilon} \\, P(A \\mid \\mathrm{without})"
        " + \\delta$\n\n\n"
        "and the same with both sides exchanged.\n\n"
        "So a result multiplies anybody's odds on one record by at most $e^{\\varepsilon}$,\n"
        "rare results aside: $\\delta$ is the most that they add to any probability.",
        note="Read the inequality aloud in words. Delta comes last, and is tiny.",
    ),
    Slide(
        "Update your odds",
        "Before the result, you believe with probability 20% that Alice took part.\n"
        "How sure can you be afterwards, at epsilon 0.1, 1 and 4?",
        note="Let them compute on paper: odds, times e to the epsilon, back to a probability.",
    ),
    Slide(
        "Your odds, updated",
        "These are the most, rare results aside.",
        "epsilon   factor of the odds   probability, at most\n"
        "    0.1                 1.11                    22%\n"
        "    1                   2.72                    40%\n"
        "    4                   54.6                    93%",
        note="Two in ten become four in ten at epsilon 1. At 4 little protection is left.",
    ),
    Slide(
        "Clip, sum, noise, account",
        "1.  Clip: each person's contribution is shortened to length C or less.\n\n"
        "2.  Sum over all people.\n\n"
        "3.  Noise: add a Gaussian with standard deviation σ C. Release the noisy sum.\n\n"
        "4.  Account: enter the release into the ledger, before it happens.\n\n"
        "The model must compute each person's part from this person's row alone.",
        note="Each step has a reason: without clipping, no noise is large enough.",
    ),
    Slide(
        "Swap SVI for DPSVI",
        "Model, guide, optimizer and loss stay. Open notebook 1, in pairs.",
        "+ accountant = PrivacyAccountant(epsilon=1.0, delta=1e-5)\n"
        "- svi = SVI(model, guide, optim, Trace_ELBO())\n"
        "+ svi = DPSVI(model, guide, optim, Trace_ELBO(), accountant=accountant)\n\n"
        "  svi.run(x, y)\n"
        "  print(accountant)",
        note="Walk around. Stuck pairs mostly have a cell that they did not run.",
    ),
    Slide(
        "Read the ledger aloud",
        "Which number is the promise? Which says how much noise there was?\n"
        "Which parts of this table may be published?",
        "release                      sample rate  noise multiplier       count\n"
        "Gaussian noise, all records            1            3.7313  9 together\n"
        "epsilon so far: 0.9999\n"
        "remaining: 0.0001 of 1\n"
        "delta: 1e-05\n"
        "neighboring: add_or_remove_one",
        note="One of each pair reads, and the other objects.",
    ),
    Slide(
        "The promise, and the noise",
        "The promise is epsilon with delta: 0.9999 and 1e-05.\n\n"
        "The noise multiplier is the noise, in units of what one person can add.\n"
        "All nine looks together count as one release with 3.7313.\n\n"
        "The table follows from public numbers and releases.\nAll of it may be published.",
        note="Ask which of the two numbers a patient cares about: epsilon.",
    ),
    Slide(
        "Two studies of the same people",
        "The budget is epsilon = 1. A first study has cost 0.8.\n\n"
        "How large an epsilon can a second study have, taken by itself?\n\n"
        "1.  0.2\n2.  More than 0.2\n3.  1",
        note="Most people choose 0.2. Let them say why before you go on.",
    ),
    Slide(
        "Squares add up",
        "Four times as many releases cost about twice as much.\n"
        "After a study of 0.8, one of 0.55 fits into a budget of 1.",
        picture=("2_what_adds_up", 0),
        note="Squares of 1/noise add up, like the sides of a right triangle.",
    ),
    Slide(
        "One budget, three analyses",
        "Added, they break the budget. Counted by the accountant, they fit.",
        picture=("2_what_adds_up", 2),
        note="Ask who keeps the ledger in their institution.",
    ),
    Slide(
        "Which intervals hold?",
        "Noise moves a posterior.\n\n"
        "A naive interval ignores the noise: it is as wide as the exact one, and moved.\n\n"
        "We fit 12 times, at epsilon = 0.3, with different noise.\n"
        "What share of the exact posterior will naive 95% intervals hold: 90%, 70% or 50%?",
        note="Explain naive again: the width is right for data without noise.",
    ),
    Slide(
        "Naive: 73%. With the noise: 97%, and 95%",
        "C found: DPSEP without any setting chooses its own bound C.\nIts intervals are shorter.",
        picture=("4b_intervals_that_hold", 0),
        note="Ask who would notice this in a single fit. Nobody can.",
    ),
    Slide(
        "Noise of a public size can be included",
        "The noise in the natural parameter has a public variance v.\n"
        "The mean is Σ times that parameter. So noise adds the covariance v Σ²:\n\n\n"
        "        $\\Sigma_{\\mathrm{aware}} = \\Sigma + v \\, \\Sigma^2$\n\n\n"
        "If people say much about a coefficient, Σ² is tiny, and privacy is nearly free.\n\n"
        "It does not cover the bias of clipping, or a wrong model.",
        note="If time is short, skip the formula: public noise is like measurement error.",
    ),
    Slide(
        "Does the run say ok?",
        "Below a posterior stands its status. It is made from releases alone.\n\n"
        "ok: no release speaks against the intervals. Use them.\n\n"
        "check: some intervals may hold less often. Publish them with the status.\n\n"
        "do not publish: the result says little about the data. Ask a smaller question,\n"
        "with more records or the next budget.",
        note="Stress that no status is proof. It can only find what the releases reveal.",
    ),
    Slide(
        "What no status and no epsilon covers",
        "Numbers chosen by looking at the data: bounds, features, models.\n\n"
        "A person with several rows, unless the person is the record.\n\n"
        "Another ledger about the same people.\n\n"
        "A wrong model, or a few people far above all others.\n\n"
        "Facts about people in general.",
        note="Ask for an example of each. This answers the third question at the end.",
    ),
    Slide(
        "Monday and Tuesday again, privately",
        "A smaller question: how do body mass index, blood pressure and blood fat\n"
        "predict the progression? One accountant holds epsilon = 1 for both days.\n\n"
        "Alice's attacker subtracts again. Which of her numbers come out?\n\n"
        "And is the private posterior still useful?",
        note="Remind them of slide 5, and take a bet on each question.",
    ),
    Slide(
        "The attack fails, and the answer is useful",
        "Stolen index: 42.2 from the exact pair, −435.9 from the private pair.\n"
        "Both of Tuesday's posteriors explain 48% of the variance.",
        picture=("0_what_leaks", 2),
        note="Alice's index is nonsense, and the finding about everybody stands.",
    ),
    Slide(
        "Three questions for you",
        "1.  What does epsilon = 1 promise to one person?\n\n"
        "2.  Two private results differ. Which one do you trust, and where do you look?\n\n"
        "3.  Name one thing that the guarantee does not cover.\n\n\n"
        "At home: notebooks 0 and 1, then questions 1 to 4 of the quiz.",
        note="Give two minutes of silence. The answers are in the course's page for instructors.",
    ),
)


def pictures(notebook: str) -> list[bytes]:
    cells = json.loads((DOCS.parent / "tutorials" / f"{notebook}.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    found = [each["data"]["image/png"] for each in outputs if "image/png" in each.get("data", {})]
    return [base64.b64decode(each) for each in found]


def page(slide: Slide, number: int) -> plt.Figure:
    figure = plt.figure(figsize=(13.33, 7.5), facecolor="white")
    figure.text(0.06, 0.87, slide.title, fontsize=34, color=BLUE, weight="bold")
    figure.text(0.94, 0.04, str(number), fontsize=12, color=GREY, ha="right")
    figure.text(0.06, 0.80, slide.text, fontsize=21, color=BLACK, va="top", linespacing=1.35)
    if slide.code:
        style = dict(family="monospace", fontsize=18, va="top", linespacing=1.5)
        below = 0.70 - 0.06 * slide.text.count("\n")
        figure.text(0.06, below, slide.code, color=BLACK, **style)
    if slide.picture:
        notebook, index = slide.picture
        axes = figure.add_axes((0.06, 0.07, 0.88, 0.60))
        axes.imshow(matplotlib.image.imread(io.BytesIO(pictures(notebook)[index])))
        axes.set_axis_off()
    return figure


def write(path: Path) -> None:
    metadata = {"Title": "Private Bayesian inference: a first lesson", "CreationDate": None}
    with PdfPages(path, metadata=metadata) as deck:
        for number, slide in enumerate(DECK, start=1):
            figure = page(slide, number)
            deck.attach_note(slide.note)
            deck.savefig(figure)
            plt.close(figure)


if __name__ == "__main__":
    write(DOCS / "slides.pdf")
