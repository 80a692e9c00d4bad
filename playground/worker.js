// A worker: a share of the questions of each step. All of them hold the same weights, because each makes the
// same update from the same sum of gradients; no memory is shared, so the page also runs from file://.

import { CONTEXT, SIZE, createMemory, createRows, createScratch, createWeights, forward, logitsAfter } from "./model.js";
import {
  ANSWER_LIMIT, PROMPT_LIMIT, POLICY, STANDARD, createMoments, createOptimizer, distribution, drawAnswers, groupAdvantage, layOut,
  lossAndGradient, promptOf, random,
} from "./grpo.js";
import { formatOk, isRight, reward, total } from "./rewards.js";
import { textOf } from "./tokenizer.js";

let rows, referenceRows, gradient, scratch, moments, update, vocabulary, groups;
const models = {}; // start, trained (by the default run), own (trained on this page)

const bytes = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));

const perform = {
  /** Memory for `questions` questions of `answers` answers each; data: base64, as build.py packed it. */
  async open({ data, words, questions, answers }) {
    const capacity = questions * (PROMPT_LIMIT + answers * ANSWER_LIMIT);
    const memory = await createMemory(bytes(data.wasm), 16 + Math.ceil(capacity / 16)); // MiB: 64 KiB for each row
    for (const name of ["start", "trained", "own"]) models[name] = createWeights(memory);
    rows = createRows(memory, capacity);
    referenceRows = createRows(memory, capacity);
    gradient = createWeights(memory);
    scratch = createScratch(memory, capacity);
    models.start.numbers.set(new Float32Array(bytes(data.start).buffer));
    // bfloat16 is the upper half of a float32.
    const change = new Float32Array(Uint32Array.from(new Uint16Array(bytes(data.change).buffer), (x) => x << 16).buffer);
    models.trained.numbers.set(models.start.numbers.map((weight, i) => weight + change[i]));
    vocabulary = words;
    perform.reset();
  },

  /** The page's own model is untrained again. */
  reset() {
    perform.restore({ weights: models.start.numbers, moments: createMoments(SIZE) });
  },

  /** What a training has come to: its weights and what AdamW remembers. */
  saved: () => ({ weights: models.own.numbers.slice(), moments }),

  restore(saved) {
    models.own.numbers.set(saved.weights);
    moments = saved.moments;
    update = createOptimizer(SIZE, moments);
  },

  /** The logits after a text, [VOCABULARY]. */
  logits({ model, tokens }) {
    layOut(rows, models[model], [{ tokens, answers: [[]] }]);
    return Array.from(logitsAfter(rows, rows.count - 1));
  },

  /** Answers to one question, and at each token what else could have been drawn. */
  draw({ model, tokens, answers, sampling, seed }) {
    const randoms = Array.from({ length: answers }, (_, i) => random(seed, i));
    const [group] = drawAnswers(rows, models[model], [{ tokens: promptOf(tokens), randoms }], sampling);
    return group.map((answer) => ({
      tokens: answer.tokens,
      text: textOf(answer.tokens, vocabulary),
      choices: answer.rows.map((row) => Array.from(distribution(logitsAfter(rows, row), sampling))),
    }));
  },

  /** Draws and grades the answers of a step, and returns the gradient of this worker's share of the loss. */
  step({ questions, answers, points, seed, step, temperature, ...given }) {
    const prompts = questions.map(({ tokens, id }) => ({
      tokens: promptOf(tokens),
      randoms: Array.from({ length: answers }, (_, i) => random(seed, step, id, i)),
    }));
    groups = drawAnswers(rows, models.own, prompts, { ...POLICY, temperature });
    const graded = groups.map((group, q) => {
      const texts = group.map((answer) => textOf(answer.tokens, vocabulary));
      const parts = group.map((answer, i) => reward(texts[i], questions[q].gold, points, answer.tokens.length));
      const advantages = groupAdvantage(parts.map(total));
      group.forEach((answer, i) => { answer.advantage = advantages[i]; });
      return group.map((answer, i) => ({
        tokens: answer.tokens, text: texts[i], points: parts[i], advantage: advantages[i], length: answer.tokens.length,
        right: isRight(texts[i], questions[q].gold), form: formatOk(texts[i]),
      }));
    });
    const { pushes, ...found } = perform.gradientOf({ ...given, temperature });
    graded.flat().forEach((answer, i) => { answer.pushes = pushes[i]; });
    return { ...found, groups: graded };
  },

  /** The gradient on the answers of the last step again, by the weights that its updates have left. */
  again(given) {
    forward(rows, models.own, 0);
    return perform.gradientOf(given);
  },

  /** The loss and its gradient on answers that are given: [{ tokens, answers, advantages, old }]. */
  loss({ prompts, ...given }) {
    groups = layOut(rows, models.own, prompts);
    groups.forEach((group, q) => group.forEach((answer, i) => {
      answer.advantage = prompts[q].advantages[i];
      answer.old = prompts[q].old?.[i];
    }));
    return perform.gradientOf(given);
  },

  gradientOf(given) {
    gradient.numbers.fill(0);
    const reference = { rows: referenceRows, weights: models.start };
    const figures = lossAndGradient(rows, models.own, gradient, scratch, groups, { ...given, reference });
    return { figures, gradient: gradient.numbers.slice(), pushes: groups.flat().map(({ pushes }) => pushes) };
  },

  /** One update of the weights by the sum of all workers' gradients: { norm, moved }. */
  apply({ gradient, rate }) {
    return update(models.own.numbers, gradient, rate);
  },

  /** Asks each question once, as the main script asks its held-out ones: [{ text, right, form }]. */
  evaluate({ model, questions, seed }) {
    const graded = [], room = Math.floor(rows.capacity / CONTEXT);
    for (let first = 0; first < questions.length; first += room) {
      const some = questions.slice(first, first + room);
      const prompts = some.map(({ tokens, id }) => ({ tokens: promptOf(tokens), randoms: [random(seed, id)] }));
      drawAnswers(rows, models[model], prompts, STANDARD).forEach(([answer], q) => {
        const text = textOf(answer.tokens, vocabulary);
        graded.push({ text, form: formatOk(text), right: isRight(text, some[q].gold) });
      });
    }
    return graded;
  },
};

globalThis.onmessage = async ({ data: { id, task, ...given } }) => {
  try {
    const answer = await perform[task](given);
    globalThis.postMessage({ id, answer }, answer?.gradient ? [answer.gradient.buffer] : []);
  } catch (error) {
    globalThis.postMessage({ id, error: String(error) });
  }
};
