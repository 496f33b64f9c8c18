"""The main job: a word problem, searched as a tree. Three levels, four branches per node, scored by the model.

Every branch shares all tokens before it with its parent and siblings: nothing is sent, tokenized or computed twice.
What loses leaves the cache at once; the winner's tokens and KV become the state, which goes on to the answer.
The default model is tiny: watch the sharing rather than the arithmetic.
"""

import time

import anabranch as ab

QUESTION = "A baker fills 6 trays with 4 rolls each. She sells 9 rolls and 3 rolls fall down. How many rolls are left?"
EXAMPLE = "A boy has 5 bags with 3 apples each. He eats 4 apples and gives 2 away. How many apples are left?"
SOLUTION = """
Step: 5 bags with 3 apples each are 5 * 3 = 15 apples.
Step: He eats 4, so 15 - 4 = 11 are left.
Step: He gives 2 away, so 11 - 2 = 9 are left.
The answer is 9"""
LEVELS, BRANCHES, KEEP = 3, 4, 3


def show(level, pairs):
    print(f"level {level + 1}: {len(pairs)} branches, the {KEEP} likeliest go on")
    for rank, (score, branch) in enumerate(pairs):
        print(f"  {'+' if rank < KEEP else ' '} {score:6.3f}  {branch['step'].strip()[:88]}")


@ab.function
def solve(s, question):
    s += ab.system("You solve word problems step by step. Each step is one short line.")
    s += ab.user(EXAMPLE) + ab.assistant(SOLUTION)
    s += ab.user(question) + ab.assistant_begin()
    step = "\nStep:" + ab.gen("step", max_tokens=32, stop="\n", temperature=0.6)
    ab.beam(s, step, "step", width=KEEP, branching=BRANCHES, depth=LEVELS, on_level=show)
    s += "\nThe answer is" + ab.gen("answer", regex=r" [0-9]{1,3}", max_tokens=8, temperature=0)
    s += ab.assistant_end()


began = time.perf_counter()
print(QUESTION, "\n")
state = solve.run(question=QUESTION, seed=5)
seconds = time.perf_counter() - began
usage = state.usage()

print("\nthe path that won:", state.messages()[-1]["content"], "\n\nthe tree (● won, × dropped):", sep="\n")
print(state.tree())
print(f"""
tokens computed                               {usage.total_computed:>8}
tokens a cold run of every branch computes    {usage.cold_tokens:>8}
share of prompt tokens served from cache      {usage.hit_rate:>8.1%}
pages copied on write                         {usage.copied_pages:>8}
generated tokens per second                   {usage.completion_tokens / seconds:>8.1f}
wall time                                     {seconds:>7.2f}s""")

assert state["answer"].strip().isdigit()
assert state.messages()[-1]["content"].count("\nStep:") == LEVELS
assert usage.hit_rate > 0.8 and usage.total_computed < usage.cold_tokens / 2
