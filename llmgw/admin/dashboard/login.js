// The token is shown once, as any other caller shows it; the cookie that comes back does from then on.

import { applyTheme } from "/assets/theme.js";

applyTheme();
const form = document.getElementById("login");
const field = document.getElementById("token");
const fault = document.getElementById("fault");

function tell(text) {
  fault.textContent = text;
  fault.hidden = false;
  field.setAttribute("aria-invalid", "true");
  field.select();
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = field.value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) return tell("A token is one word of plain letters, digits and signs.");
  try {
    const answer = await fetch("/api/session", { method: "POST", headers: { authorization: `Bearer ${token}` } });
    if (answer.ok) return location.reload();
    if (answer.status === 401) return tell("That is not the token.");
    if (answer.status === 429) return tell("That is not the token, and too many were tried from here.");
    tell(`The gateway answered ${answer.status}.`);
  } catch {
    tell("The gateway does not answer.");
  }
});
