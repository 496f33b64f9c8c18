"""Few-shot questions over one shared prompt: a batch whose items all find the examples in the cache."""

import anabranch as ab

EXAMPLES = [
    ("France", "Paris"), ("Germany", "Berlin"), ("Italy", "Rome"), ("Spain", "Madrid"),
    ("Egypt", "Cairo"), ("Kenya", "Nairobi"), ("Peru", "Lima"), ("Canada", "Ottawa"),
]  # fmt: skip
COUNTRIES = ["Japan", "China", "Russia", "Greece", "Portugal", "Austria", "Norway", "Cuba"]


@ab.function
def capital(s, country):
    s += "The following are questions about capitals, each with a one-word answer.\n\n"
    for known, answer in EXAMPLES:
        s += f"Q: What is the capital of {known}?\nA: {answer}\n"
    s += f"Q: What is the capital of {country}?\nA:"
    s += ab.gen("answer", stop="\n", max_tokens=8, temperature=0)


capital.cache()  # compute the constant prefix once, before the batch
states = capital.run_batch([{"country": c} for c in COUNTRIES], progress_bar=True)
for country, state in zip(COUNTRIES, states):
    print(f"{country:10} {state['answer'].strip()}")
usage = ab.Usage.of(states)
print(usage)

assert [bool(state) for state in states] == [True] * len(COUNTRIES)
assert all("\n" not in state["answer"] for state in states)
assert usage.hit_rate > 0.8  # the examples were computed once, for all questions
