"""The files of a search of `raytf tune` that others read, too: the list of runs and the pages; see
`raytf.tune.search_record`."""

from __future__ import annotations

from raytf.storage import untrusted_json

#: The folder of a search, what makes a folder one, and where what became of its trials is; the folder of the best.
SEARCH, IDENTITY, TRIALS, BEST = "search", "search.json", "trials", "best"
#: How the folders of trials begin.
TRIAL = "trial-"
#: What is known of a trial that is over.
RECORD = untrusted_json.record(
    {
        "number": untrusted_json.whole,
        "parameters": untrusted_json.values(untrusted_json.anything),
        "outcome": untrusted_json.text,
    },
    {
        "value": untrusted_json.optional(untrusted_json.number),
        "epochs": untrusted_json.whole,
        "why": untrusted_json.text,
        "history": untrusted_json.each(untrusted_json.values(untrusted_json.number)),
        "metrics": untrusted_json.values(untrusted_json.number),
    },
)
