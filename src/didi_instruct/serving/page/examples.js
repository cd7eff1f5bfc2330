// Texts to begin with, for models of stories and for models of proteins.

const STORIES = {
  prompts: [
    "Once upon a time, there was a little dragon who",
    "Tom and his dog went to the beach. They found",
    "Lily was sad because",
    "",
  ],
  text:
    "Once upon a time there was a little dragon who lived in a tall tower. Every day he looked at the sea " +
    "and felt lonely. One day a bird came and sang to him. They became good friends.",
  selected: "looked at the sea and felt lonely",
};

// Ubiquitin of man, 76 residues.
const PROTEINS = {
  prompts: ["MQIFVKTLTGKT", "MKT", ""],
  text: "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG",
  selected: "ENVKAKIQDKEG",
};

/** Beginnings, a text and the part of it to rewrite, for what the first model writes. */
export function examplesFor(models) {
  const { prompts, text, selected } = models[0].proteins ? PROTEINS : STORIES;
  const from = text.indexOf(selected);
  return { prompts, text, selection: { from, to: from + selected.length } };
}
