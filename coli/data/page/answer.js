// The text of the conversation on the screen: drafted text marked, and never more nodes than a tab carries for days.

const MOST_ARTICLES = 100;
const MOST_NODES = 600; // marks and texts between them, in all answers together
const MOST_TEXT = 200_000; // characters of one article; of longer ones the end is shown

export class Log {
  #log;

  constructor(log) {
    this.#log = log;
  }

  clear() {
    this.#log.replaceChildren();
  }

  busy(is) {
    this.#log.setAttribute("aria-busy", String(is)); // a screen reader speaks the whole answer, not every token
  }

  // Add an article and return where its text goes.
  add(role, text = "") {
    const article = document.createElement("article");
    article.className = `said ${role}`;
    const head = document.createElement("h3");
    head.textContent = role === "user" ? "You" : "Answer";
    const body = document.createElement("div");
    body.className = "text";
    if (text) body.append(text);
    article.append(head, body);
    this.#log.append(article);
    while (this.#log.children.length > MOST_ARTICLES) this.#log.firstElementChild.remove();
    this.#scroll(true);
    return new Article(article, body, () => this.#trim(), () => this.#scroll(false));
  }

  #scroll(always) {
    const log = this.#log;
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }

  #trim() {
    let nodes = 0;
    const bodies = [...this.#log.querySelectorAll(".text")].reverse();
    for (const body of bodies) {
      nodes += body.childNodes.length;
      if (nodes <= MOST_NODES) continue;
      flatten(body, nodes - MOST_NODES + MOST_NODES / 4);
      nodes = Math.min(nodes, MOST_NODES);
    }
  }
}

// The first `count` nodes of an answer become one text without marks.
function flatten(body, count) {
  const old = [...body.childNodes].slice(0, count + 1);
  const text = old.map((node) => (node.className === "rejected" ? "" : node.textContent)).join("");
  old[0].before(text.slice(-MOST_TEXT));
  for (const node of old) node.remove();
}

class Article {
  #article; #body; #trim; #scroll; #parts = []; #frame = 0;

  constructor(article, body, trim, scroll) {
    [this.#article, this.#body, this.#trim, this.#scroll] = [article, body, trim, scroll];
  }

  // parts: {text, source, rejected}, drawn with the next frame.
  write(parts) {
    this.#parts.push(...parts);
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    for (const { text, source, rejected } of this.#parts) this.#put(text, source, rejected);
    this.#parts = [];
    this.#trim();
    this.#scroll();
  }

  note(text) {
    const note = document.createElement("p");
    note.className = "note";
    note.textContent = text;
    this.#article.append(note);
    this.#scroll();
  }

  remove() {
    this.#article.remove();
  }

  #put(text, source, rejected) {
    if (rejected) {
      const mark = document.createElement("span");
      mark.className = "rejected";
      mark.textContent = `x${rejected}`;
      mark.title = `${rejected} drafted ${rejected === 1 ? "token" : "tokens"} rejected here`;
      mark.setAttribute("aria-hidden", "true");
      this.#body.append(mark);
    }
    if (!text) return;
    const last = this.#body.lastChild;
    if (source) {
      if (last?.className === "draft" && last.dataset.source === source) {
        last.firstChild.appendData(text);
        return;
      }
      const span = document.createElement("span");
      span.className = "draft";
      span.dataset.source = source;
      span.title = `drafted by ${source}`;
      span.append(text);
      this.#body.append(span);
    } else if (last?.nodeType === Node.TEXT_NODE) {
      last.appendData(text);
      if (last.length > MOST_TEXT) last.deleteData(0, last.length - MOST_TEXT);
    } else {
      this.#body.append(text);
    }
  }
}
