// The conversation: kept in this tab (a reload finds it again), sent whole with every message, stopped at will.

import { Log } from "./answer.js";
import { ask, events, Refused } from "./server.js";

const KEPT = "coli-conversation";
const SETTINGS = "coli-settings";
const FIELDS = ["temperature", "max_tokens", "seed", "system", "grammar"];
const MOST_KEPT = 1_000_000; // characters kept over a reload

const element = (id) => document.getElementById(id);

export class Chat {
  #log = new Log(element("log")); #messages = []; #running = null; #refused;

  // refused: hears when the key is wrong and returns when there is another.
  constructor(refused) {
    this.#refused = refused;
    const question = element("question");
    // a field that is wrong must be seen to be mended
    element("ask").addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
    element("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(question.value);
    });
    question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send(question.value);
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    element("stop").addEventListener("click", () => this.stop());
    element("clear").addEventListener("click", () => this.clear());
    for (const name of FIELDS) element(name).addEventListener("change", () => this.#keepSettings());
    this.#restore();
  }

  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.#messages = [];
    this.#log.clear();
    this.#keep();
    this.#say("");
    element("question").focus();
  }

  async #send(text) {
    if (!text.trim() || this.#running) return;
    this.#say("");
    element("question").value = "";
    const messages = this.#messages;
    messages.push({ role: "user", content: text });
    const asked = this.#log.add("user", text);
    const answer = this.#log.add("assistant");
    const said = { role: "assistant", content: "" };
    this.#begin();
    try {
      const body = this.#body(messages);
      let response;
      try {
        response = await ask("/v1/chat/completions", { body, signal: this.#running.signal });
      } catch (error) {
        if (!(error instanceof Refused) || error.status !== 401) throw error;
        await this.#refused();
        response = await ask("/v1/chat/completions", { body, signal: this.#running.signal });
      }
      let end = "the connection was lost";
      for await (const chunk of events(response)) {
        if (chunk.error) throw new Refused(500, chunk.error.message);
        const choice = chunk.choices[0];
        if (choice?.delta.content) {
          said.content += choice.delta.content;
          answer.write(chunk.coli?.parts ?? [{ text: choice.delta.content }]);
        }
        if (choice?.finish_reason) end = choice.finish_reason;
        if (chunk.usage) end = summary(chunk, end);
      }
      answer.flush();
      answer.note(end);
    } catch (error) {
      answer.flush();
      if (error.name === "AbortError") {
        answer.note("stopped");
      } else if (said.content) {
        answer.note(`ended by an error: ${error.message}`);
        this.#say(error.message);
      } else {
        messages.pop(); // a question that could not be answered is not part of the conversation
        asked.remove();
        answer.remove();
        if (!element("question").value) element("question").value = text;
        this.#say(error instanceof Refused ? error.message : `The server cannot be reached: ${error.message}`);
      }
    }
    if (said.content && messages === this.#messages) messages.push(said);
    else if (messages[messages.length - 1]?.role === "user") messages.push(said);
    this.#end();
    this.#keep();
  }

  #body(messages) {
    const value = (name) => element(name).value.trim();
    const body = { messages: [...messages], stream: true, stream_options: { include_usage: true, include_drafts: true } };
    if (value("system")) body.messages.unshift({ role: "system", content: value("system") });
    for (const name of ["temperature", "max_tokens", "seed"]) if (value(name)) body[name] = Number(value(name));
    body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0]; // one that JavaScript's numbers can show and send again
    const grammar = value("grammar");
    if (grammar.startsWith("{")) {
      let schema;
      try {
        schema = JSON.parse(grammar);
      } catch (error) {
        throw new Refused(400, `The JSON Schema in the settings: ${error.message}`);
      }
      body.response_format = { type: "json_schema", json_schema: { name: "schema", schema } };
    } else if (grammar) {
      body.grammar = grammar;
    }
    return body;
  }

  #begin() {
    this.#running = new AbortController();
    this.#log.busy(true);
    element("send").disabled = true;
    element("stop").disabled = false;
  }

  #end() {
    this.#running = null;
    this.#log.busy(false);
    element("send").disabled = false;
    if (document.activeElement === element("stop") || document.activeElement === document.body) element("question").focus();
    element("stop").disabled = true;
  }

  #say(error) {
    element("error").textContent = error;
  }

  #keep() {
    let text = JSON.stringify(this.#messages);
    for (let from = 1; text.length > MOST_KEPT && from < this.#messages.length; from += 1) {
      text = JSON.stringify(this.#messages.slice(from));
    }
    try {
      sessionStorage.setItem(KEPT, text.length > MOST_KEPT ? "[]" : text);
    } catch { /* no room: a reload begins anew */ }
  }

  #keepSettings() {
    sessionStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(FIELDS.map((name) => [name, element(name).value]))));
  }

  #restore() {
    const settings = JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}");
    for (const name of FIELDS) element(name).value = settings[name] ?? "";
    this.#messages = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
    for (const { role, content } of this.#messages) this.#log.add(role, content);
  }
}

function summary({ usage, coli }, reason) {
  const { completion_tokens: tokens, prompt_tokens: prompt, prompt_tokens_details: details } = usage;
  const decoded = Math.max(0, tokens - 1);
  const each = coli.forwards ? `, ${(decoded / coli.forwards).toFixed(2)} tokens per forward` : "";
  return `${tokens} tokens in ${coli.forwards} forwards${each}; prompt ${prompt}, ${details.cached_tokens} kept; seed ${coli.seed}; ended by ${reason}`;
}
