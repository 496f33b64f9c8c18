"""Tree of thought, depth first: follow the best idea, come back when it leads nowhere, stop at the first that is
good.
"""

import anabranch as ab

WORDS = ["river", "stone", "bridge"]


def used(branch):
    """How many of the words the story has by now, less a little for its length."""
    story = branch.text().split("Story:")[-1].lower()
    return sum(word in story for word in WORDS) - len(story) / 10_000


@ab.function
def story(s):
    s += f"Write a short story with the words {', '.join(WORDS)}.\nStory: Once upon a time"
    sentence = ab.gen("sentence", max_tokens=24, stop=".", temperature=1.0) + "."
    return ab.tree_of_thought(
        s, sentence, used, branching=3, depth=3, threshold=0.0,
        solved=lambda branch: used(branch) > len(WORDS) - 0.5,
    )  # fmt: skip


state = story.run(seed=5)
print(state.text(), "\n")
print(state.tree())
print("all words used" if state.ret_value else "the best that was found")

assert state.text().startswith("Write a short story")
assert state.ret_value == (used(state) > len(WORDS) - 0.5)
assert state.usage().saved > 0.2  # siblings share their story so far; going back costs nothing
