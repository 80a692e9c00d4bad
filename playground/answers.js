// Room 4: eight answers to one question, drawn by the model before the reader's eyes.

import { oneOf, range, remember, starts, words } from "./address.js";
import { text } from "./texts.js";
import { button, choice, h, number, quiet, signed, slider } from "./dom.js";
import { groupAdvantage, PROMPT_LIMIT } from "./grpo.js";
import { POINTS, judged, reward, total } from "./rewards.js";
import { pieces } from "./tokenizer.js";
import { HELD_OUT, VOCABULARY_WORDS } from "./pool.js";

const PER_SECOND = 20; // tokens shown
const CHOICES = 10; // listed of what could have been drawn
const LIST = HELD_OUT.slice(0, 24);

export const fields = {
  question: words(LIST[2].text, 300), gold: words(LIST[2].gold, 6), model: oneOf("start", ["start", "trained", "own"]), temperature: range(1, 0.1, 2),
};
export const settings = starts(fields);
// asked: what the answers on show were drawn from; they are never graded by another question's number.
const state = { seed: 0, asked: null, drawn: null, chosen: null };

export function answersRoom(place, pool, ownSteps) {
  const cards = h("div", { class: "cards", id: "cards" }), told = h("p", { class: "notice", id: "eight_told", "aria-live": "polite" });
  const known = h("p", { id: "known", "aria-live": "polite" }), hint = quiet("eight_click"), from = h("p", { class: "quiet", id: "eight_from" });
  const enter = ({ key, isComposing }) => { if (key === "Enter" && !isComposing) draw(); };
  const input = h("input", { type: "text", id: "question_text", maxlength: 300, value: settings.question, "aria-label": text("eight_question"), onkeydown: enter,
    oninput: () => asks(input.value, LIST.find((question) => question.text === input.value)?.gold ?? "") });
  const gold = h("input", { type: "number", id: "gold", value: settings.gold, "aria-label": text("eight_gold"), onkeydown: enter,
    oninput: () => { settings.gold = gold.value.trim(); changed(); if (state.drawn) show(Infinity); } });
  const drawButton = button(text("eight_draw"), () => draw(), { class: "main", id: "draw" });
  const models = [["start", text("model_start")], ["trained", text("model_trained")],
    ["own", ownSteps() ? text("model_own", { steps: ownSteps() }) : text("model_own_none")]];
  const picker = choice("question", text("eight_choose"), [["", text("eight_own")], ...LIST.map((question, i) => [String(i), question.text])], "", (i) => {
    if (i === "") { input.focus(); input.select(); return; }
    input.value = LIST[i].text;
    asks(LIST[i].text, LIST[i].gold);
    draw();
  });
  if (settings.model === "own" && !ownSteps()) settings.model = "start";

  /** Another question: its number is not that of the one before, and the answers on show are not its own. */
  function asks(question, number) {
    current += 1;
    Object.assign(settings, { question, gold: number });
    Object.assign(state, { asked: null, drawn: null, chosen: null });
    gold.value = number;
    cards.replaceChildren();
    told.hidden = hint.hidden = from.hidden = true;
    changed();
  }

  function changed() {
    remember();
    picker.querySelector("select").value = String(LIST.findIndex(({ text: question }) => question === settings.question)).replace("-1", "");
    return check();
  }

  /** The question's tokens, or null: unknown words are marked, and what cannot be asked is said. */
  function check() {
    const parts = pieces(settings.question, VOCABULARY_WORDS), unknown = parts.filter((part) => part.token === undefined);
    const tokens = parts.length + 2; // its begin and end marks
    const fault = !parts.length ? text("eight_empty")
      : unknown.length ? text("eight_unknown")
      : tokens > PROMPT_LIMIT ? text("eight_long", { tokens, limit: PROMPT_LIMIT })
      : !/^\d{1,6}$/.test(settings.gold) ? text("eight_gold_needed") : "";
    known.replaceChildren(
      ...(unknown.length ? parts.map((part) => h("span", { class: part.token === undefined ? "unknown" : "" }, part.text)) : []),
      unknown.length ? h("br") : "", fault || text("eight_tokens", { tokens }));
    known.className = fault ? "bad" : "quiet";
    drawButton.disabled = Boolean(fault);
    return fault ? null : parts.map((part) => part.token);
  }

  let current = 0;
  async function draw() {
    const tokens = check();
    if (!tokens) return;
    const mine = (current += 1), asked = { ...settings, steps: ownSteps() };
    state.seed += 1;
    const sampling = { temperature: asked.temperature, topK: VOCABULARY_WORDS.length, topP: 1 };
    let drawn;
    try {
      drawn = await (await pool()).ask("draw", { model: asked.model, tokens, answers: 8, sampling, seed: state.seed });
    } catch (error) {
      known.className = "bad";
      known.textContent = text("train_fault", { fault: error.message });
      return;
    }
    if (mine !== current || !cards.isConnected) return;
    Object.assign(state, { asked, drawn, chosen: null });
    const longest = Math.max(...drawn.map((answer) => answer.tokens.length)), began = performance.now();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return show(Infinity);
    const frame = () => {
      if (mine !== current || !cards.isConnected) return;
      const shown = Math.floor(((performance.now() - began) / 1000) * PER_SECOND);
      show(shown >= longest ? Infinity : shown);
      if (shown < longest) setTimeout(frame, 1000 / PER_SECOND);
    };
    frame();
  }

  /** The cards up to `shown` tokens of each answer; points when all are there. */
  function show(shown) {
    const { drawn, asked } = state, right = settings.gold, done = shown === Infinity && /^\d{1,6}$/.test(right);
    const parts = drawn.map((answer) => reward(answer.text, right, POINTS, answer.tokens.length));
    const rewards = parts.map(total), advantages = groupAdvantage(rewards);
    const verdicts = drawn.map((answer) => judged(answer.text, right));
    cards.replaceChildren(...drawn.map((answer, i) => h("article", { class: `card ${done && advantages[i] ? (advantages[i] > 0 ? "above" : "below") : ""}` },
      h("h3", {}, h("span", {}, `${i + 1}`), done ? h("span", { class: `judged ${verdicts[i] === "right" ? "good" : verdicts[i] === "untagged" ? "" : "bad"}` },
        text(`judged_${verdicts[i]}`)) : ""),
      h("div", { class: "written" }, answer.tokens.slice(0, shown === Infinity ? undefined : shown).map((token, t) => h("button", {
        type: "button", class: `token${answer.choices[t][token] < 0.9 ? " unsure" : ""}`, "data-answer": i, "data-token": t, id: `token_${i}_${t}`,
        "aria-pressed": String(state.chosen?.[0] === i && state.chosen[1] === t),
        onclick: () => { state.chosen = [i, t]; show(Infinity); document.getElementById(`token_${i}_${t}`).focus(); },
      }, token === 2 ? "■" : VOCABULARY_WORDS[token]))),
      done && state.chosen?.[0] === i ? others(...state.chosen) : "",
      done ? h("table", {}, Object.entries(parts[i]).map(([name, points]) =>
        h("tr", {}, h("td", {}, name), h("td", { class: "number" }, number(points, 2)))),
      h("tr", {}, h("td", {}, h("strong", {}, text("sum"))), h("td", { class: "number" }, h("strong", {}, number(rewards[i], 2)))),
      h("tr", {}, h("td", {}, text("advantage")), h("td", { class: `number ${advantages[i] > 0 ? "good" : advantages[i] < 0 ? "bad" : ""}` }, signed(advantages[i])))) : "")));
    told.hidden = hint.hidden = from.hidden = !done;
    if (!done) return;
    from.textContent = text("eight_from", { model: text(asked.model === "own" ? "model_own" : `model_${asked.model}`, { steps: asked.steps }), temperature: number(asked.temperature, 1) });
    const mean = rewards.reduce((a, b) => a + b, 0) / 8;
    told.textContent = Math.max(...rewards) === Math.min(...rewards)
      ? text("eight_same", { points: number(rewards[0]) }) : text("eight_told", { mean: number(mean) });
  }

  /** What could have been drawn where the chosen token stands. */
  function others(i, t) {
    const choices = state.drawn[i].choices[t], taken = state.drawn[i].tokens[t];
    const order = [...choices.keys()].sort((a, b) => choices[b] - choices[a]);
    const listed = order.filter((token, rank) => token === taken || (rank < CHOICES && choices[token] > 0.001));
    const rest = 1 - listed.reduce((sum, token) => sum + choices[token], 0);
    return h("div", { id: "other", "aria-live": "polite" }, h("strong", {}, text("eight_other", { token: t + 1 })),
      h("div", { class: "choices" }, listed.map((token) => {
        const bar = h("i");
        bar.style.width = `${100 * choices[token]}%`;
        return [h("span", { class: token === taken ? "taken" : "" }, VOCABULARY_WORDS[token].replace(/^ /, "␣")), bar,
          h("span", { class: "share" }, `${number(100 * choices[token], 1)} %`)];
      })), quiet("eight_other_about", { rest: number(100 * rest, 1), count: choices.length - 1 - listed.length }));
  }

  place.append(
    h("h2", {}, text("eight_title")), h("p", {}, text("eight_about")),
    h("div", { class: "controls" }, picker),
    h("div", { class: "controls" }, input, h("label", {}, text("eight_gold"), " ", gold)), known,
    h("details", {}, h("summary", {}, text("eight_words")), h("p", {}, VOCABULARY_WORDS.slice(10).filter((word) => word.startsWith(" ")).map((word) => word.trim()).join(", "))),
    h("div", { class: "controls", role: "group", "aria-label": text("eight_model") }, models.map(([name, label]) => button(label, ({ currentTarget }) => {
      settings.model = name;
      for (const sibling of currentTarget.parentElement.children) sibling.setAttribute("aria-pressed", String(sibling === currentTarget));
      remember();
      draw();
    }, { "aria-pressed": String(settings.model === name), id: `model_${name}`, disabled: name === "own" && !ownSteps() }))),
    h("div", { class: "controls" }, drawButton,
      slider("temperature", text("temperature"), { min: 0.1, max: 2, step: 0.1, value: settings.temperature, show: (x) => number(x, 1), change: (x) => { settings.temperature = x; remember(); } })),
    told, hint, from, cards);
  told.hidden = hint.hidden = from.hidden = true;
  changed();
  const { asked } = state; // answers to something else, asked for by the address, are no answers to this
  if (asked && asked.question === settings.question && asked.model === settings.model && asked.temperature === settings.temperature) show(Infinity);
  else draw();
}
