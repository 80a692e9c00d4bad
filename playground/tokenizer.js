// Text to the 76 tokens and back, as 5_GRPO_Maxtext/tiny_llama/tokenizer.json says.

const PIECES = /<\/?(?:reasoning|answer)>| ?[A-Za-z]+|\d|[^\sA-Za-z\d]|\s/gu;

/** [{ text, token }] of a text; token is undefined for what the model has no token for. */
export function pieces(text, vocabulary) {
  const ids = new Map(vocabulary.map((word, id) => [word, id]));
  return (text.match(PIECES) ?? []).map((piece) => ({ text: piece, token: ids.get(piece) }));
}

/** The text of an answer; its end token and the like (ids below 5) are no text. */
export const textOf = (tokens, vocabulary) => tokens.filter((id) => id >= 5).map((id) => vocabulary[id]).join("");
