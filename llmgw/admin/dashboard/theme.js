// Light, dark, or as the system has it; remembered by the browser.

const NAMES = ["auto", "light", "dark"];

function chosen() {
  try {
    const name = localStorage.getItem("llmgw-theme");
    return NAMES.includes(name) ? name : "auto";
  } catch {
    return "auto"; // storage is forbidden
  }
}

export function applyTheme(name = chosen()) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  return name;
}

export function themeButton(button) {
  const show = (name) => {
    button.textContent = `Theme: ${name}`;
  };
  show(applyTheme());
  button.addEventListener("click", () => {
    const next = NAMES[(NAMES.indexOf(chosen()) + 1) % NAMES.length];
    try {
      localStorage.setItem("llmgw-theme", next);
    } catch {
      // it lasts until the page is left
    }
    show(applyTheme(next));
  });
}
