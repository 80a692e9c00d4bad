// The address holds what the reader has set: #room=grid&lang=zh&walls=11_14. A link to it opens the same thing.

export const ROOMS = ["grid", "bandit", "clip", "answers", "train"];
export const frame = { room: "grid", figure: null, lang: null, theme: null, mission: null, embed: false };
let fields = {}, settings = {};

/** Kinds of settings: { start: the value where the address says nothing, read(text): undefined if it is no such value }. */
export const range = (start, min, max) => ({ start, read: (text) => {
  const x = Number(text);
  return text.trim() !== "" && x >= min && x <= max ? x : undefined;
} });
export const whole = (start, min, max) => ({ start, read: (text) => {
  const x = range(start, min, max).read(text);
  return Number.isInteger(x) ? x : undefined;
} });
export const oneOf = (start, values) => ({ start, values, read: (text) => (values.includes(text) ? text : undefined) });
export const flag = { start: false, read: (text) => ({ 1: true, 0: false })[text] };
export const words = (start, longest) => ({ start, read: (text) => text.slice(0, longest) });
/** `count` numbers joined by "_". */
export const numbers = (start, min, max, count) => ({ start, read: (text) => {
  const list = text.split("_").map((part) => range(0, min, max).read(part));
  return list.length === count && !list.includes(undefined) ? list : undefined;
} });
/** Any number of different whole numbers, in order. */
export const wholes = (min, max) => ({ start: [], read: (text) => {
  const list = text === "" ? [] : text.split("_").map((part) => whole(0, min, max).read(part));
  return list.includes(undefined) ? undefined : [...new Set(list)].sort((a, b) => a - b);
} });

const written = (value) => (Array.isArray(value) ? value.join("_") : typeof value === "boolean" ? String(Number(value)) : String(value));
export const starts = (kinds) => Object.fromEntries(Object.entries(kinds).map(([name, { start }]) => [name, start]));

/** What the address asks for. #train, ?lang=zh and a tab's number as the room are read, too. */
export function readFrame() {
  const hash = location.hash.slice(1), given = new URLSearchParams(ROOMS.includes(hash) ? `room=${hash}` : hash);
  const room = given.get("room") ?? "", lang = given.get("lang") ?? new URLSearchParams(location.search).get("lang");
  frame.room = ROOMS.includes(room) ? room : (ROOMS[Number(room) - 1] ?? frame.room);
  frame.mission = given.get("mission");
  frame.figure = given.get("figure");
  frame.embed = given.get("embed") === "1" || frame.figure !== null;
  if (lang) frame.lang = lang.toLowerCase().startsWith("zh") ? "zh" : "en";
  if (["light", "dark"].includes(given.get("theme"))) frame.theme = given.get("theme");
  return given;
}

/** Sets what an address names, and the rest as at the start; one that names no setting changes none. Whether any changed. */
export function follow(kinds, values, named, mission) {
  const given = asks(kinds, named) ? named : mission, before = JSON.stringify(values);
  if (!asks(kinds, given)) return false;
  for (const [name, { start, read }] of Object.entries(kinds)) {
    values[name] = (given.has(name) ? read(given.get(name)) : undefined) ?? start;
  }
  return JSON.stringify(values) !== before;
}

/** Whether an address names any of these settings. */
export const asks = (kinds, given) => Object.keys(kinds).some((name) => given.has(name));

/** Which settings are written into the address from now on. */
export function watch(kinds, values) {
  fields = kinds;
  settings = values;
}

/** The address of a room: `values` are named where they are not those of the start. */
export function addressOf(room, kinds = {}, values = {}) {
  const named = new URLSearchParams({ room });
  for (const name of ["lang", "theme", "mission"]) if (frame[name]) named.set(name, frame[name]);
  // With a mission, all: what isn't named there would be what the mission sets up.
  for (const [name, { start }] of Object.entries(kinds)) {
    if (frame.mission || written(values[name]) !== written(start)) named.set(name, written(values[name]));
  }
  return `#${named}`;
}

/** Writes the settings into the address; nothing is loaded anew. */
export function remember() {
  const named = new URLSearchParams(addressOf(frame.room, fields, settings).slice(1));
  if (frame.figure) named.set("figure", frame.figure);
  else if (frame.embed) named.set("embed", "1");
  history.replaceState(null, "", `#${named}`);
}
