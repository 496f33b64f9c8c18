"""Branch, solve, merge: judge a text by several criteria apart, then read all verdicts and decide.

The branches' own tokens are appended to the parent as they are; they are not tokenized again, only placed.
"""

import anabranch as ab

ESSAY = (
    "Rivers shape the land. They carry stones and sand from the mountains to the sea, they feed forests and fields, "
    "and people have always built their towns beside them. To know a country, follow its rivers."
)
CRITERIA = ["clarity", "style", "content"]


@ab.function
def judge(s, essay):
    s += ab.system("You are a fair judge of essays.")
    s += ab.user(f"Essay:\n{essay}\n\nI will ask you about it.")
    verdicts = [
        ab.user(f"Judge its {criterion} in one sentence.") + ab.assistant(ab.gen(criterion, max_tokens=32, stop="\n"))
        for criterion in CRITERIA
    ]
    grade = ab.user("All in all, what grade does it get?") + ab.assistant("Grade: " + ab.select("grade", list("ABCDF")))
    ab.branch_solve_merge(s, verdicts, grade)


state = judge.run(essay=ESSAY, temperature=0.7, seed=4)
for message in state.messages()[2:]:
    print(f"{message['role']:>9}: {message['content'].strip()}")
print({g: round(p, 2) for g, p in zip("ABCDF", state.get_meta_info("grade")["scores"])})
print(state.usage())

assert len(state.messages()) == 2 + 2 * len(CRITERIA) + 2
assert state["grade"] in "ABCDF"
assert state.usage().hit_rate > 0.4  # the essay was read once
