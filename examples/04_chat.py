"""Multi-turn chat: every turn finds the whole conversation in the cache, what the model said included, token for
token.
"""

import anabranch as ab

QUESTIONS = ["What is a river?", "Name one in Europe.", "And one in Africa?", "Which of the two is longer?"]


@ab.function
def chat(s, questions):
    s += ab.system("You answer in one short sentence.")
    for i, question in enumerate(questions):
        s += ab.user(question)
        with s.assistant():
            for piece in s.stream(ab.gen(f"answer_{i}", max_tokens=32, temperature=0.3)):
                print(piece, end="", flush=True)
        cost = s.get_meta_info(f"answer_{i}")
        print(f"   [{cost['cached_tokens']} of {cost['prompt_tokens']} prompt tokens from cache]")


state = chat.run(QUESTIONS, seed=1)
print(state.usage())

assert [m["role"] for m in state.messages()] == ["system"] + ["user", "assistant"] * len(QUESTIONS)
for turn in range(1, len(QUESTIONS)):
    before, now = state.get_meta_info(f"answer_{turn - 1}"), state.get_meta_info(f"answer_{turn}")
    whole_last_turn = before["prompt_tokens"] + before["completion_tokens"]
    assert now["cached_tokens"] >= whole_last_turn - 1  # only the new question is computed
