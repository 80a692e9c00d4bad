// Missions of each room: a state to set up, something to predict first, and the chapter that explains it.

import { frame, remember } from "./address.js";
import { language, text } from "./texts.js";
import { button, h } from "./dom.js";
import { POINTS } from "./rewards.js";

/** sets: what the address names to set it up; right: which of the choices, counted from 0. */
export const MISSIONS = {
  grid: [
    { name: "crawl", sets: ["epsilon=0.5&speed=6"], right: 0 },
    { name: "walls", sets: ["walls=11_14&alpha=1&speed=1000"], right: 1 },
    { name: "greedy", sets: ["epsilon=0&speed=10"], right: 0 },
    { name: "slip", sets: ["slip=0.4&alpha=1&speed=1000", "slip=0.4&alpha=0.05&speed=1000"], right: 1 },
  ],
  bandit: [
    { name: "plus_ten", sets: ["shift=0", "shift=10"], right: 1 },
    { name: "samples", sets: ["shift=10&samples=8", "shift=10&samples=64"], right: 2 },
    { name: "small", sets: ["shift=10", "shift=10&rate=0.1"], right: 2 },
    { name: "alone", sets: ["samples=1", "samples=2"], right: 1 },
  ],
  clip: [
    { name: "edge", sets: ["ratio=1.35&A=-1"], right: 1 },
    { name: "lucky", sets: ["clip=off&lucky=3&passes=20", "clip=on&lucky=3&passes=20"], right: 2 },
    { name: "pull", sets: ["clip=off&beta=1&lucky=3&passes=20"], right: 1 },
    { name: "equal", sets: ["rewards=4_4_4_4_4_4_4_4"], right: 1 },
    { name: "critic", sets: ["v2=10&lambda=0", "v2=10&lambda=1"], right: 2 },
  ],
  answers: [
    { name: "cold", sets: ["temperature=0.1"], right: 0 },
    { name: "solved", sets: ["model=trained&temperature=0.7"], right: 1 },
    { name: "tags", sets: ["model=start&temperature=1"], right: 1 },
  ],
  train: [
    { name: "course", sets: ["preset=course"], right: 0 },
    { name: "ramble", sets: ["preset=length&beta=0", "preset=length&beta=0.5"], right: 1 },
    { name: "kl", sets: ["preset=form&beta=0", "preset=form&beta=0.08"], right: 2 },
    { name: "reuse", sets: ["updates=8&clip=off&beta=0", "updates=8&clip=0.2&beta=0"], right: 1 },
  ],
};

/** What the rewards of the course pay: the numbers in the sentences about them. */
const pays = () => ({
  format: POINTS.format, tag: POINTS.tag, tags: 4 * POINTS.tag, wrong: -POINTS.wrong,
  form: POINTS.format + 4 * POINTS.tag, number: POINTS.right + POINTS.number,
  formWrong: POINTS.format + 4 * POINTS.tag + POINTS.wrong,
  threeTags: (3 - 1) * POINTS.tag, // the one that is missing counts against them
});

/** The pages of the course that a room belongs to: [what it is called, its English page]. */
export const CHAPTERS = {
  grid: [["chapter_1", "1_Q_Learning/README.md"]],
  bandit: [["chapter_3_reinforce", "3_Pendulum/README.md"]],
  clip: [["chapter_3", "3_Pendulum/ppo.md"], ["chapter_4", "4_GRPO_MNIST/README.md"]],
  answers: [["chapter_5", "5_GRPO_Maxtext/README.md"]],
  train: [["chapter_5", "5_GRPO_Maxtext/README.md"], ["chapter_5_measured", "5_GRPO_Maxtext/MEASUREMENTS.md"]],
};

const HOME = "5_GRPO_Maxtext/assets/playground.html";
/** Where a page of the course is from here; null where this file has been taken out of the course's folder. */
export function addressOfPage(page) {
  if (!decodeURIComponent(location.pathname).endsWith(`/${HOME}`)) return null;
  const chinese = language() === "zh";
  // The course's site has HTML in place of Markdown, and a folder for Chinese; what builds it says so here.
  if (document.querySelector('meta[name="course"]').content === "html")
    return `../../${chinese ? "zh/" : ""}${page.replace("README", "index").replace(".md", ".html")}`;
  return `../../${chinese ? page.replace(".md", "_ch.md") : page}`;
}
export function pageLink(name, page) {
  const address = addressOfPage(page);
  return address ? h("a", { href: address, target: frame.embed ? "_top" : undefined }, text(name)) : h("span", {}, `${text(name)} (${page})`);
}

/** The address that sets a mission up. */
export function addressOfMission(room, name, set) {
  const named = new URLSearchParams({ room });
  if (frame.lang) named.set("lang", frame.lang);
  if (frame.theme) named.set("theme", frame.theme);
  named.set("mission", name);
  return `#${named}&${set}`;
}

/** What a mission sets up first, for an address that names the mission alone. */
export const setOf = (room, name) => MISSIONS[room].find((mission) => mission.name === name)?.sets[0];

const guesses = {};

/**
 * The room's missions: one is open at a time.
 *
 * visit(name): its link was followed; numbers: { name: a function that computes those of its sentences }.
 */
export function missionsOf(room, visit, numbers) {
  const card = h("div", { class: "mission", id: "mission", hidden: true, "aria-live": "polite" });
  const list = MISSIONS[room];
  const chips = list.map(({ name }) => button(text(`mission_${name}`), () => {
    frame.mission = frame.mission === name ? null : name;
    remember();
    show();
  }, { id: `mission_${name}` }));

  function show() {
    chips.forEach((chip, i) => chip.setAttribute("aria-expanded", String(list[i].name === frame.mission)));
    const mission = list.find(({ name }) => name === frame.mission);
    card.hidden = !mission;
    if (!mission) return;
    const { name, sets, right } = mission, guessed = guesses[name];
    const say = (part) => text(`mission_${name}_${part}`, (numbers[name] ?? pays)());
    const choices = say("choices").split("|");
    card.replaceChildren(
      h("p", {}, say("ask")),
      h("div", { class: "controls", role: "group", "aria-label": text("mission_guess") }, h("span", {}, text("mission_guess")), choices.map((choice, i) => button(choice, () => {
        guesses[name] = i;
        show();
        document.getElementById(`guess_${i}`).focus();
      }, { id: `guess_${i}`, "aria-pressed": String(guessed === i) }))),
      h("ol", { class: "sets" }, sets.map((set, i) => h("li", {}, h("a", {
        class: "button", id: `set_${i}`, href: addressOfMission(room, name, set), onclick: () => visit(name),
      }, say("set").split("|")[i])))),
      guessed === undefined ? "" : h("p", { class: "why" }, h("strong", { class: guessed === right ? "good" : "bad" },
        text(guessed === right ? "mission_yes" : "mission_no")), " ", say("why")));
  }
  show();
  return h("section", { class: "missions", "aria-labelledby": "missions_title" }, h("h2", { id: "missions_title" }, text("missions")),
    h("div", { class: "controls" }, chips), card);
}
