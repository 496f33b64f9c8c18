"""Self-consistency: think several times, vote over the answers."""

import anabranch as ab


@ab.function
def solve(s, question, votes):
    s += ab.system("You solve word problems. You think briefly and give a number.")
    s += ab.user("Eva has 2 blue and 5 green hats. How many hats has she?")
    s += ab.assistant("2 blue and 5 green hats are 2 + 5 = 7 hats.\nThe answer is 7.")
    s += ab.user(question)
    think = ab.gen("thought", max_tokens=40, stop="\n", temperature=0.8)
    attempt = ab.assistant(think + "\nThe answer is " + ab.gen("answer", type=int, max_tokens=6, temperature=0) + ".")
    return ab.self_consistency(s, attempt, "answer", votes)


state = solve.run(question="Tom has 3 red and 4 blue marbles. How many marbles has he?", votes=8, seed=2)
vote = state.ret_value
for answer, count in sorted(vote.counts.items(), key=lambda item: -item[1]):
    print(f"{answer:>8}  {'#' * count}")
print(f"the answer is {vote.answer}, with {vote.share:.0%} of the votes")
print(state.usage())

assert sum(vote.counts.values()) == 8 and vote.counts[vote.answer] == max(vote.counts.values())
assert state["answer"] == vote.answer and isinstance(vote.answer, int)
assert state.usage().hit_rate > 0.5
