// Who would take a request now: candidates, scores, reasons.

import { make, text, width } from "/assets/dom.js";
import { figure, seconds } from "/assets/format.js";

// Which scores win is the router's own affair; what it chose shows it.
function winner({ candidates, choice }) {
  const scores = candidates.map((each) => each.score);
  const chosen = candidates.find((each) => each.backend === choice)?.score;
  if (chosen == null || scores.some((score) => score == null)) return "";
  const [least, most] = [Math.min(...scores), Math.max(...scores)];
  // Routers take what is almost equal for equal.
  const near = (one) => Math.abs(chosen - one) <= 0.1 * Math.abs(one);
  if (near(least) === near(most)) return "";
  return near(least) ? ", least wins" : ", most wins";
}

export class Explain {
  constructor(page) {
    this.page = page;
    page.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    page.body.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.ask();
    });
    page.model.addEventListener("change", () => this.fill(page.model.value));
  }

  showModels(names) {
    const wanted = names.join("\n");
    if (wanted === this.shown) return;
    this.shown = wanted;
    const before = this.page.model.value;
    this.page.model.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(before)) this.page.model.value = before;
    if (!this.page.body.value && names.length) this.fill(this.page.model.value);
  }

  fill(model) {
    let body;
    try {
      body = { ...JSON.parse(this.page.body.value), model };
    } catch {
      body = { model, messages: [{ role: "user", content: "Hello" }] };
    }
    this.page.body.value = JSON.stringify(body, null, 1).replace(/\n\s*/g, " ");
    if ([...this.page.model.options].some((option) => option.value === model)) this.page.model.value = model;
  }

  like(model) {
    this.fill(model);
    this.page.form.scrollIntoView({ block: "nearest" });
    this.page.body.focus();
    this.ask();
  }

  async ask() {
    let answer;
    let said;
    try {
      answer = await fetch("/api/explain", { method: "POST", body: this.page.body.value, headers: { "content-type": "application/json" } });
      said = await answer.json();
    } catch {
      return this.refusal("The gateway does not answer.");
    }
    if (!answer.ok) return this.refusal(`${answer.status} ${said.error?.code ?? ""}: ${said.error?.message ?? "no reason given"}`);
    this.page.result.replaceChildren(...this.told(said));
  }

  refusal(words) {
    this.page.result.replaceChildren(make("p", { class: "fault" }, words));
  }

  told(said) {
    const parts = [];
    const alias = said.target !== said.model ? ` (as ${said.target})` : "";
    if (said.choice) {
      parts.push(make("p", { class: "verdict" }, make("b", {}, said.choice), ` would take ${said.model}${alias}: ${said.why || "the router gives no reason"}.`));
    } else {
      const why = said.refusal ? `${said.refusal.code}: ${said.refusal.message}` : "the router declines all candidates";
      parts.push(make("p", { class: "verdict fault" }, `Nobody would take ${said.model}${alias} now. ${why}`));
    }
    parts.push(make("p", { class: "note" }, `About ${figure(said.prompt_tokens)} prompt tokens.`));
    if (said.candidates.length) {
      const most = Math.max(...said.candidates.map((each) => Math.abs(each.score ?? 0)), 1e-9);
      const rows = said.candidates.map((each) => {
        const fill = make("span", { class: "fill" });
        width(fill, Math.abs(each.score ?? 0) / most);
        const chosen = each.backend === said.choice;
        const figures = make(
          "tr",
          { "data-chosen": chosen },
          make("th", { scope: "row" }, each.backend, chosen ? make("span", { class: "mark" }, "chosen") : null),
          make("td", {}, make("span", { class: "track" }, fill), make("span", { class: "portion" }, each.score == null ? "–" : figure(each.score, 2))),
          make("td", {}, `${each.in_flight} of ${each.max_connections}`),
          make("td", {}, seconds(each.ttft_s)),
        );
        // What a router says of one candidate alone is worth a line when it is more than the score.
        const plain = !each.why || /^\w+ [\d.e+-]+( s)?, \w+ of 1$/.test(each.why);
        return plain ? [figures] : [figures, make("tr", { class: "aside" }, make("td", { colspan: "4", class: "why" }, each.why))];
      });
      const heads = ["Candidate", `Score${winner(said)}`, "In flight", "First token"];
      parts.push(make("div", { class: "scroll" }, make("table", { class: "candidates" }, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...rows.flat()))));
    }
    if (said.left_out.length) {
      parts.push(make("h3", {}, "Left out"));
      parts.push(make("ul", { class: "plain" }, ...said.left_out.map((each) => make("li", {}, make("b", {}, each.backend), ` ${each.why}`))));
    }
    return parts;
  }
}
