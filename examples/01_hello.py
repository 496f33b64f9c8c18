"""Hello: a program is a function over a state. Text and generations are added to it; forks share everything before
them.
"""

import anabranch as ab


@ab.function
def hello(s, name):
    s += ab.system("You are friendly and brief.")
    s += ab.user(f"Say hello to {name} in one short sentence.")
    greetings = s.fork(3)  # three branches that share every token up to here
    greetings += ab.assistant(ab.gen("greeting", max_tokens=20, temperature=0.8))
    greetings.join()  # their variables come back as lists


state = hello.run(name="Ada", seed=1)
for greeting in state["greeting"]:
    print("-", greeting.strip())
print()
print(state.tree())

assert len(state["greeting"]) == 3
assert hello.run(name="Ada", seed=1)["greeting"] == state["greeting"]  # a seed fixes every branch
assert state.usage().saved > 0
