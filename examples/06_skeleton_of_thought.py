"""Skeleton of thought: a short outline first, then every point expanded side by side, then one text of them all."""

import anabranch as ab

POINTS = 4


@ab.function
def article(s, topic):
    s += ab.system("You give clear, short advice.")
    s += ab.user(f"Give {POINTS} tips for {topic}.")
    s += ab.assistant_begin()
    for i in range(1, POINTS + 1):
        s += f"{i}." + ab.gen("point", max_tokens=12, stop=["\n", ".", "?"]) + "\n"
    s += ab.assistant_end()

    details = s.fork(POINTS)
    details += lambda i: ab.user(f"Explain tip {i + 1} in one sentence.")
    details += ab.assistant(ab.gen("detail", max_tokens=32, stop="\n"))
    details.join()  # aligned: s["detail"][i] belongs to tip i + 1


state = article.run(topic="learning to swim", temperature=0.5, seed=3)
outline = state.messages()[-1]["content"].strip().split("\n")
for point, detail in zip(outline, state["detail"]):
    print(f"{point}\n   {detail.strip()}")
print()
print(state.usage())

assert len(outline) == len(state["detail"]) == POINTS
assert len(state.messages()) == 3  # the branches left no trace in the conversation
assert state.usage().hit_rate > 0.5  # the outline was computed once for all expansions
