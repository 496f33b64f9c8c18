"""A ReAct agent with a tool. While the tool works, a lease keeps the agent's KV; the observation is all that is
computed after it.
"""

import anabranch as ab

LENGTHS = {"rhine": 1230, "danube": 2850, "thames": 346}
PROMPT = """Answer the question with the help of a lookup tool for rivers.
Question: How long is the Thames?
Thought: I must look up the Thames.
Action: Lookup [Thames]
Observation: The Thames is 346 km long.
Thought: I know the answer.
Action: Finish [346 km]
"""


def lookup(name):
    length = LENGTHS.get(name.strip().lower())
    return f"The {name.strip()} is {length} km long." if length else "Nothing is known about that."


@ab.function
def agent(s, question, max_turns=4):
    s += PROMPT + f"Question: {question}\n"
    for _ in range(max_turns):
        s += "Thought:" + ab.gen("thought", stop="\n", max_tokens=20) + "\nAction: "
        s += ab.select("action", ["Lookup", "Finish"])
        s += " [" + ab.gen("argument", stop=["]", "\n"], max_tokens=8) + "]\n"
        if s["action"] == "Finish":
            break
        argument = s["argument"]
        s.lease(30)  # the branch comes back after the tool call: keep its KV, within the lease budget
        observation = lookup(argument)
        s.lease(0)
        s += f"Observation: {observation}\n"
    return s["argument"]


state = agent.run(question="How long is the Danube?", temperature=0, seed=6)
print(state.text()[len(PROMPT) :])
print("answer:", state.ret_value)
print(state.usage())

assert state["action"] in ("Lookup", "Finish")
assert state.text().startswith(PROMPT)
assert state.usage().hit_rate > 0.5  # no turn computes again what an earlier one had
