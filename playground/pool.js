// The workers, and training over all of them: each draws and grades its share of the questions, the page adds
// their gradients up, and every worker makes the same update.

import { learningRate, random } from "./grpo.js";

const DATA = JSON.parse(document.getElementById("data").textContent);
export const VOCABULARY_WORDS = DATA.vocabulary;

/** [{ id, tokens, text, gold }] of what build.py packed. */
export function unpack(base64) {
  const ids = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const parts = [[]];
  for (const id of ids) id === 0 ? parts.push([]) : parts.at(-1).push(id);
  const words = (tokens) => tokens.map((id) => DATA.vocabulary[id]).join("");
  const questions = [];
  for (let i = 0; i + 1 < parts.length; i += 2) {
    questions.push({ id: i / 2, tokens: parts[i], text: words(parts[i]), gold: words(parts[i + 1]) });
  }
  return questions;
}
export const HELD_OUT = unpack(DATA.heldOut);
let unpacked;
const trainingQuestions = () => (unpacked ??= unpack(DATA.train)); // 4,000: not while the page opens

export const COUNT = Math.max(1, Math.min(4, navigator.hardwareConcurrency || 1));
export const BATCH = 16; // questions per step: BATCH_SIZE of the main script

/** COUNT workers that can hold BATCH questions of `answers` answers between them. */
export async function openPool(answers) {
  const url = URL.createObjectURL(new Blob([document.getElementById("worker").textContent], { type: "text/javascript" }));
  const workers = Array.from({ length: COUNT }, () => {
    const worker = new Worker(url), waiting = new Map();
    let next = 0;
    worker.onmessage = ({ data: { id, answer, error } }) => {
      const { done, fail } = waiting.get(id);
      waiting.delete(id);
      error === undefined ? done(answer) : fail(new Error(error));
    };
    return {
      ask: (task, given = {}) => new Promise((done, fail) => {
        waiting.set(next, { done, fail });
        worker.postMessage({ id: next++, task, ...given });
      }),
      end: () => worker.terminate(),
    };
  });
  const everyone = (task, given) => Promise.all(workers.map((worker) => worker.ask(task, given)));
  // A question and its answers stay together: the advantage compares them.
  const shared = (list) => workers.map((_, w) => list.filter((_, i) => i % COUNT === w));
  const inOrder = (parts, length) => Array.from({ length }, (_, i) => parts[i % COUNT][Math.floor(i / COUNT)]);

  await everyone("open", { data: { wasm: DATA.wasm, start: DATA.start, change: DATA.change }, words: DATA.vocabulary,
    questions: Math.ceil(BATCH / COUNT), answers });
  URL.revokeObjectURL(url);

  return {
    answers,
    end: () => workers.forEach((worker) => worker.end()),
    reset: () => everyone("reset"),
    /** A task of one worker alone. */
    ask: (task, given) => workers[0].ask(task, given),

    /** The weights trained here and AdamW's memory, which every worker holds alike. */
    saved: () => workers[0].ask("saved"),
    restore: (saved) => everyone("restore", saved),

    /**
     * One step of GRPO: [groups of graded answers] and the step's figures.
     *
     * updates: how often the same answers are used (NUM_ITERATIONS). The figures are those of the first update,
     * except `clipped`, the share of tokens without a gradient in the last one; null where there was only one.
     */
    async step({ answers, beta, epsilon, updates, rate, points, temperature, seed, step, steps }) {
      const order = random(seed, step), chosen = new Set();
      const all = trainingQuestions();
      while (chosen.size < BATCH) chosen.add(Math.floor(order() * all.length));
      const questions = [...chosen].map((i) => all[i]), given = { beta, epsilon, temperature, count: BATCH * answers };
      const apply = async (parts) => {
        const [{ gradient }, ...others] = parts;
        for (const other of others) for (let i = 0; i < gradient.length; i++) gradient[i] += other.gradient[i];
        const [update] = await everyone("apply", { gradient, rate: learningRate(rate, step, steps) });
        return update;
      };
      const sum = (parts, name) => parts.reduce((total, { figures }) => total + figures[name], 0);
      const parts = await Promise.all(shared(questions).map((share, w) => workers[w].ask("step", {
        questions: share, answers, points, seed, step, ...given,
      })));
      const { norm, moved } = await apply(parts);
      let last;
      for (let i = 1; i < updates; i++) await apply(last = await everyone("again", given));
      const groups = inOrder(parts.map((part) => part.groups), BATCH), tokens = sum(parts, "tokens");
      return {
        questions, groups, norm, moved, loss: sum(parts, "loss"), kl: sum(parts, "kl") / tokens,
        entropy: sum(parts, "entropy") / tokens, clipped: last ? sum(last, "clipped") / tokens : null,
      };
    },

    /** The held-out questions, each asked once: shares right and in form, and the answers. */
    async evaluate(model, seed) {
      const parts = await Promise.all(shared(HELD_OUT).map((share, w) =>
        workers[w].ask("evaluate", { model, questions: share, seed })));
      const answers = inOrder(parts, HELD_OUT.length);
      const share = (what) => answers.filter((answer) => answer[what]).length / answers.length;
      return { right: share("right"), form: share("form"), answers };
    },
  };
}
