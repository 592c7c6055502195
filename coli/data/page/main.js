// Puts the two sides together; asks for the key once for both.

import { Chat } from "./chat.js";
import { EngineView } from "./engine.js";
import { HeatMap } from "./map.js";
import { ask, useKey } from "./server.js";

const element = (id) => document.getElementById(id);
let keyed = null;

// Ask for the key, once however many wait for it.
function askForKey() {
  const form = element("key-form");
  keyed ??= new Promise((resolve) => {
    form.hidden = false;
    element("key").focus();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      useKey(element("key").value);
      element("key").value = "";
      form.hidden = true;
      keyed = null;
      resolve();
    }, { once: true });
  });
  return keyed;
}

async function defaults() {
  const props = await (await ask("/props")).json();
  const set = props.default_generation_settings;
  element("temperature").placeholder = set.temperature;
  element("max_tokens").placeholder = set.max_tokens;
}

let known = false;
function linked(is, state) {
  element("link").textContent = is ? "" : "no connection to the server, trying again";
  if (!is || known) return;
  known = true;
  const { name, layers, num_experts: experts } = state.model;
  element("model").textContent = layers.length ? `${name}, ${layers.length} layers of ${experts} experts` : name;
  document.title = `coli: ${name}`;
  defaults().catch(() => {});
}

const view = new EngineView(new HeatMap(element("map"), element("cell")));
element("layer-details").addEventListener("toggle", () => view.refresh());
new Chat(askForKey);
view.watch(askForKey, linked);
