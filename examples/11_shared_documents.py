"""Retrieval with shared documents: several questions on the same documents, read once; and documents added side by
side.
"""

import anabranch as ab

DOCUMENTS = [
    "The Old Mill was built in 1742 beside the river Elm. It ground wheat until the great flood of 1890.",
    "The Stone Bridge crosses the Elm below the mill. Its five arches were built between 1801 and 1804.",
    "The Lighthouse on Gull Point has shone since 1866. Its keeper, Mary Holt, lit the lamp for forty years.",
]
QUESTIONS = ["When was the Old Mill built?", "How many arches has the Stone Bridge?", "Who kept the lighthouse?"]


@ab.function
def answer_all(s, questions):
    s += "Read these documents.\n"
    documents = s.fork(len(DOCUMENTS))
    documents += [f"Document {i + 1}: {text}\n" for i, text in enumerate(DOCUMENTS)]
    documents.join("concate_and_append")  # in order, token by token

    answers = s.fork(len(questions))  # one branch per question, all on the same documents
    answers += [f"Question: {question}\nAnswer:" for question in questions]
    answers += ab.gen("answer", max_tokens=16, stop="\n", temperature=0)
    answers.join()


state = answer_all.run(QUESTIONS)
for question, answer in zip(QUESTIONS, state["answer"]):
    print(f"{question:40} {answer.strip()}")
print(state.usage())

assert len(state["answer"]) == len(QUESTIONS)
assert all(text in state.text() for text in DOCUMENTS)

# The next visitor's questions find the documents in the cache, in another program too.
again = answer_all.run(["Where does the bridge stand?"])
cost = again.usage()
print("asked again:", cost)
assert cost.cached_tokens > 3 * cost.computed_tokens
