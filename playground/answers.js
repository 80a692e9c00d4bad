// Room 3: eight answers to one question, drawn by the model before the reader's eyes.

import { text } from "./texts.js";
import { button, choice, h, number, quiet, signed, slider } from "./dom.js";
import { groupAdvantage, PROMPT_LIMIT } from "./grpo.js";
import { POINTS, isRight, reward, total } from "./rewards.js";
import { pieces } from "./tokenizer.js";
import { HELD_OUT, VOCABULARY_WORDS } from "./pool.js";

const state = { question: HELD_OUT[2].text, gold: HELD_OUT[2].gold, model: "start", temperature: 1, seed: 0, drawn: null, chosen: null };
const PER_SECOND = 20; // tokens shown

export function answersRoom(place, pool, ownSteps) {
  const cards = h("div", { class: "cards", id: "cards" }), told = h("p", { class: "notice", id: "eight_told" });
  const known = h("p", { id: "known", "aria-live": "polite" }), hint = quiet("eight_click");
  const input = h("input", { type: "text", id: "question_text", maxlength: 300, value: state.question, "aria-label": text("eight_question"),
    oninput: () => { state.question = input.value; check(); } });
  const gold = h("input", { type: "number", id: "gold", value: state.gold, "aria-label": text("eight_gold"),
    oninput: () => { state.gold = gold.value.trim(); check(); if (state.drawn) show(Infinity); } });
  const drawButton = button(text("eight_draw"), () => draw(), { class: "main", id: "draw" });
  const models = [["start", text("model_start")], ["trained", text("model_trained")],
    ["own", ownSteps() ? text("model_own", { steps: ownSteps() }) : text("model_own_none")]];

  /** The question's tokens, or null: unknown words are marked, and what cannot be asked is said. */
  function check() {
    const parts = pieces(state.question, VOCABULARY_WORDS), unknown = parts.filter((part) => part.token === undefined);
    const tokens = parts.length + 2; // its begin and end marks
    const fault = !parts.length ? text("eight_empty")
      : unknown.length ? text("eight_unknown")
      : tokens > PROMPT_LIMIT ? text("eight_long", { tokens, limit: PROMPT_LIMIT })
      : !/^\d{1,6}$/.test(state.gold) ? text("eight_gold_needed") : "";
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
    const mine = (current += 1);
    state.seed += 1;
    state.chosen = null;
    const sampling = { temperature: state.temperature, topK: VOCABULARY_WORDS.length, topP: 1 };
    let drawn;
    try {
      drawn = await (await pool()).ask("draw", { model: state.model, tokens, answers: 8, sampling, seed: state.seed });
    } catch (error) {
      known.className = "bad";
      known.textContent = text("train_fault", { fault: error.message });
      return;
    }
    if (mine !== current || !cards.isConnected) return;
    state.drawn = drawn;
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
    const { drawn } = state, done = shown === Infinity;
    const parts = drawn.map((answer) => reward(answer.text, state.gold, POINTS, answer.tokens.length));
    const rewards = parts.map(total), advantages = groupAdvantage(rewards);
    cards.replaceChildren(...drawn.map((answer, i) => h("article", { class: `card ${done ? (advantages[i] > 0 ? "above" : "below") : ""}` },
      h("h3", {}, h("span", {}, `${i + 1}`), done ? h("span", { class: isRight(answer.text, state.gold) ? "good" : "bad" },
        isRight(answer.text, state.gold) ? text("right") : text("wrong")) : ""),
      h("div", { class: "written" }, answer.tokens.slice(0, done ? undefined : shown).map((token, t) => h("button", {
        type: "button", class: `token${answer.choices[t][token] < 0.9 ? " unsure" : ""}`, "data-answer": i, "data-token": t,
        "aria-pressed": String(state.chosen?.[0] === i && state.chosen[1] === t),
        onclick: () => { state.chosen = [i, t]; show(Infinity); cards.querySelector(`[data-answer="${i}"][data-token="${t}"]`).focus(); },
      }, token === 2 ? "■" : VOCABULARY_WORDS[token]))),
      done && state.chosen?.[0] === i ? others(...state.chosen) : "",
      done ? h("table", {}, Object.entries(parts[i]).map(([name, points]) =>
        h("tr", {}, h("td", {}, name), h("td", { class: "number" }, number(points, 2)))),
      h("tr", {}, h("td", {}, h("strong", {}, text("sum"))), h("td", { class: "number" }, h("strong", {}, number(rewards[i], 2)))),
      h("tr", {}, h("td", {}, text("advantage")), h("td", { class: `number ${advantages[i] > 0 ? "good" : "bad"}` }, signed(advantages[i])))) : "")));
    told.hidden = hint.hidden = !done;
    if (!done) return;
    const mean = rewards.reduce((a, b) => a + b, 0) / 8;
    told.textContent = Math.max(...rewards) === Math.min(...rewards)
      ? text("eight_same", { points: number(rewards[0]) }) : text("eight_told", { mean: number(mean) });
  }

  /** What could have been drawn where the chosen token stands. */
  function others(i, t) {
    const choices = state.drawn[i].choices[t], taken = state.drawn[i].tokens[t];
    const listed = [...choices.keys()].filter((token) => token === taken || choices[token] > 0.001)
      .sort((a, b) => choices[b] - choices[a]);
    return h("div", { id: "other", "aria-live": "polite" }, h("strong", {}, text("eight_other", { token: t + 1 })),
      h("div", { class: "choices" }, listed.map((token) => {
        const bar = h("i");
        bar.style.width = `${100 * choices[token]}%`;
        return [h("span", { class: token === taken ? "taken" : "" }, VOCABULARY_WORDS[token].replace(/^ /, "␣")), bar,
          h("span", {}, `${number(100 * choices[token], 1)} %`)];
      })), quiet("eight_other_about"));
  }

  const list = HELD_OUT.slice(0, 24);
  const chosen = list.findIndex(({ text: question }) => question === state.question);
  place.append(
    h("h2", {}, text("eight_title")), h("p", {}, text("eight_about")),
    h("div", { class: "controls" },
      choice("question", text("eight_choose"), [["", text("eight_own")], ...list.map((question, i) => [String(i), question.text])],
        chosen < 0 ? "" : String(chosen), (i) => {
          if (i === "") { input.focus(); input.select(); return; }
          state.question = input.value = list[i].text;
          state.gold = gold.value = list[i].gold;
          draw();
        })),
    h("div", { class: "controls" }, input, h("label", {}, text("eight_gold"), " ", gold)), known,
    h("details", {}, h("summary", {}, text("eight_words")), h("p", {}, VOCABULARY_WORDS.slice(10).filter((word) => word.startsWith(" ")).map((word) => word.trim()).join(", "))),
    h("div", { class: "controls", role: "group", "aria-label": text("eight_model") }, models.map(([name, label]) => button(label, ({ currentTarget }) => {
      state.model = name;
      for (const sibling of currentTarget.parentElement.children) sibling.setAttribute("aria-pressed", String(sibling === currentTarget));
      draw();
    }, { "aria-pressed": String(state.model === name), id: `model_${name}`, disabled: name === "own" && !ownSteps() }))),
    h("div", { class: "controls" }, drawButton,
      slider("temperature", text("temperature"), { min: 0.1, max: 2, step: 0.1, value: state.temperature, show: (x) => number(x, 1), change: (x) => { state.temperature = x; } })),
    told, hint, cards);
  told.hidden = hint.hidden = true;
  check();
  if (state.drawn) show(Infinity);
  else draw();
}
