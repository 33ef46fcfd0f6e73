"""Two documents in the form of each of the papers' five sets, written for these tests."""

import json
from pathlib import Path

DOCUMENTS = {
    "piqa": [
        {"goal": "To keep soup warm on the way to work,", "sol1": "pour it into a vacuum flask.",
         "sol2": "pour it into a paper envelope.", "label": 0},
        {"goal": "To find a small screw on a carpet,", "sol1": "drag a slice of bread over it.",
         "sol2": "drag a magnet over it.", "label": 1},
    ],
    "arc_easy": [
        {"question": "Which of these melts in the sun on a summer day?", "answerKey": "B",
         "choices": {"text": ["a stone", "an ice cube", "a coin", "a glass"], "label": ["A", "B", "C", "D"]}},
        {"question": "What do plants take from the air?", "answerKey": "C",
         "choices": {"text": ["gold", "sand", "carbon dioxide"], "label": ["A", "B", "C"]}},
    ],
    "arc_challenge": [
        {"question": "A ball rolls down a slope. Which energy grows as it rolls?", "answerKey": "2",
         "choices": {"text": ["potential energy", "kinetic energy", "chemical energy"], "label": ["1", "2", "3"]}},
        {"question": "Why does a metal spoon feel colder than a wooden one in the same room?", "answerKey": "1",
         "choices": {"text": ["It conducts heat from the hand faster.", "Its temperature is lower."],
                     "label": ["1", "2"]}},
    ],
    "winogrande": [
        {"context_options": ["The cup did not fit into the box because the cup",
                             "The cup did not fit into the box because the box"],
         "continuation": "was too large.", "gold": 0},
        {"context_options": ["Nora asked Lena for help because Nora", "Nora asked Lena for help because Lena"],
         "continuation": "knew the town well.", "gold": 1},
    ],
    "hellaswag": [
        {"query": "Baking bread: A woman kneads dough on a table. She", "gold": 1,
         "choices": ["throws the table out of the window.", "puts it into a tin and lets it rise.",
                     "paints it green and sings.", "reads the dough a letter."]},
        {"query": "Mending a tyre: A boy takes the wheel off his bicycle. He", "gold": 0,
         "choices": ["pulls out the tube and looks for the hole.", "eats the saddle.",
                     "throws the wheel into the sea.", "combs his hair with it."]},
    ],
}


def write_documents(folder: Path) -> None:
    """Write NAME.jsonl for each set."""
    for name, rows in DOCUMENTS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
