// The engine's side: figures from /engine/events, which has counters only; rates are made here, over the last seconds.

import { ask, events, Refused } from "./server.js";

const WINDOW_MS = 2000;
const RETRY_MS = 2000;

const element = (id) => document.getElementById(id);

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; count >= 1000 && at < units.length - 1; at += 1) count /= 1000;
  return `${at && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[at]}`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

export class EngineView {
  #map; #seen = []; #state = null;

  constructor(map) {
    this.#map = map;
    setInterval(() => this.#rates(), 500);
  }

  // Watch until the page goes; `refused` hears when the key is wrong and returns when there is another.
  async watch(refused, linked) {
    for (;;) {
      try {
        for await (const state of events(await ask("/engine/events"))) {
          linked(true, state);
          this.#show(state);
        }
      } catch (error) {
        if (error instanceof Refused && error.status === 401) {
          await refused();
          continue;
        }
      }
      linked(false);
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #show(state) {
    if (this.#state && state.time_s < this.#state.time_s) this.#seen = []; // another server: counters began anew
    this.#state = state;
    this.#seen.push({ at: performance.now(), tokens: state.tokens.generated, read: state.experts.bytes_read ?? 0,
      ...this.#asked(state.experts) });
    const { forwards, tokens, requests, memory, experts } = state;
    element("tpf").textContent = forwards.responses ? (tokens.decoded / forwards.responses).toFixed(2) : "–";
    element("requests").textContent = `${requests.running} of ${requests.slots} running, ${requests.waiting} waiting, ${requests.finished} answered`;
    element("memory").textContent = `${bytes(memory.process_bytes)} of a budget of ${bytes(memory.budget_bytes)}`;
    element("memory-meter").value = memory.process_bytes / memory.budget_bytes;
    if (memory.expert_total_bytes) {
      element("resident").textContent = `${bytes(memory.expert_resident_bytes)} of ${bytes(memory.expert_total_bytes)}, room for ${bytes(memory.expert_capacity_bytes)}`;
      element("resident-meter").value = memory.expert_resident_bytes / memory.expert_total_bytes;
    } else {
      element("resident").textContent = "this model has none";
    }
    this.#map.show(state.model.layers, state.map);
    this.#drafts(state.drafts);
    this.#layers(state);
    this.#rates();
  }

  #asked(experts) {
    const hits = (experts.hits ?? 0) + (experts.prefill_hits ?? 0);
    return { hits, asked: hits + (experts.misses ?? 0) + (experts.prefill_misses ?? 0) };
  }

  #rates() {
    if (!this.#state) return;
    const now = performance.now();
    while (this.#seen.length > 1 && this.#seen[1].at <= now - WINDOW_MS) this.#seen.shift();
    const [first, last] = [this.#seen[0], this.#seen[this.#seen.length - 1]];
    const seconds = Math.max(now - first.at, 500) / 1000;
    const quiet = first === last;
    element("tps").textContent = quiet ? "0" : ((last.tokens - first.tokens) / seconds).toFixed(1);
    const asked = last.asked - first.asked;
    const all = last.asked ? percent(last.hits / last.asked) : "–";
    element("hits").textContent = asked ? `${percent((last.hits - first.hits) / asked)} now, ${all} in all` : `${all} in all`;
    const speed = quiet ? 0 : (last.read - first.read) / seconds;
    const disk = this.#state.disk;
    const total = `${bytes(last.read)} in all`;
    element("read").textContent = disk ? `${bytes(speed)}/s of ${bytes(disk.bytes_per_s)}/s, ${total}` : `${bytes(speed)}/s, ${total}`;
    element("read-meter").value = disk ? Math.min(1, speed / disk.bytes_per_s) : 0;
    element("read-meter").hidden = !disk;
  }

  #drafts(drafts) {
    const rows = Object.entries(drafts).map(([source, { proposed, judged, accepted }]) =>
      [source, proposed, judged, accepted, judged ? percent(accepted / judged) : "–"]);
    fill(element("drafts"), rows.length ? rows : [["none yet", "", "", "", ""]]);
  }

  #layers({ model, map }) {
    if (!element("layer-details").open && element("layers").rows.length === model.layers.length) return;
    const count = (text, place) => text.split(place).length - 1;
    fill(element("layers"), model.layers.map((layer, at) => [
      layer, count(map.state[at], "p"), count(map.state[at], "c"), count(map.state[at], "."),
      map.used[at].reduce((sum, uses) => sum + uses, 0),
    ]));
  }

  refresh() {
    if (this.#state) this.#layers(this.#state);
  }
}

// Rows of cells into a table body; rows and cells that are there are used again.
function fill(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, at) => {
    const row = body.rows[at] ?? body.insertRow();
    while (row.cells.length > cells.length) row.deleteCell(-1);
    cells.forEach((value, column) => {
      const cell = row.cells[column] ?? row.insertCell();
      cell.removeAttribute("colspan");
      const text = String(value);
      if (cell.textContent !== text) cell.textContent = text;
    });
  });
}
