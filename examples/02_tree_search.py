"""The main job: a word problem, searched as a tree. Three levels, four branches per node, judged by the model itself.

Every branch shares all tokens before it with its parent and siblings: nothing is sent, tokenized or computed twice.
What loses leaves the cache at once; the winner's tokens and KV become the state, which goes on to the answer.
"""

import time

import anabranch as ab

QUESTION = "A baker fills 6 trays with 4 rolls each. She sells 9 rolls and drops 3. How many rolls are left?"
LEVELS, BRANCHES, KEEP = 3, 4, 3

step = "\nStep:" + ab.gen("step", max_tokens=28, stop="\n", temperature=0.9)
judge = ab.Judge(ab.assistant_end() + ab.user("Is this reasoning right? Answer Yes or No.") + ab.assistant_begin())


def show(level, pairs):
    print(f"level {level + 1}: {len(pairs)} branches, the best {min(KEEP, len(pairs))} go on")
    for rank, (value, branch) in enumerate(pairs):
        print(f"  {'+' if rank < KEEP else ' '} {value:.3f}  {branch['step'].strip()[:88]}")


@ab.function
def solve(s, question):
    s += ab.system("You solve word problems step by step. Each step is one short line.")
    s += ab.user(question)
    s += ab.assistant_begin() + "Let me think."
    ab.beam(s, step, judge, width=KEEP, branching=BRANCHES, depth=LEVELS, on_level=show)
    s += "\nThe number of rolls left is" + ab.gen("answer", regex=r" [0-9]{1,3}", max_tokens=8, temperature=0)
    s += ab.assistant_end()


began = time.perf_counter()
print(QUESTION, "\n")
state = solve.run(question=QUESTION, seed=7)
seconds = time.perf_counter() - began
usage = state.usage()

print("\nthe path that won:")
print(state.messages()[-1]["content"])
print("\nthe tree (● won, × dropped):")
print(state.tree())
print(f"""
answer                                        {state["answer"].strip():>8}
operations                                    {usage.operations:>8}
tokens computed                               {usage.total_computed:>8}
tokens a cold run of every branch computes    {usage.cold_tokens:>8}
share of prompt tokens served from cache      {usage.hit_rate:>8.1%}
pages copied on write                         {usage.copied_pages:>8}
generated tokens per second                   {usage.completion_tokens / seconds:>8.1f}
wall time                                     {seconds:>7.2f}s""")

assert state["answer"].strip().isdigit()
assert state.messages()[-1]["content"].count("\nStep:") == LEVELS
assert usage.hit_rate > 0.8 and usage.total_computed < usage.cold_tokens / 2
