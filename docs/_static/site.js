// docs/errors.md: a field that leaves the entries whose messages share most words with what is pasted.

{
  const errors = document.querySelector("#what-errors-say")
  if (errors) {
    const words = (text) => new Set(text.toLowerCase().match(/[a-z_]{2,}/g))
    const entries = [...errors.querySelectorAll("li")].map((item) => ({
      item,
      words: words([...item.querySelectorAll("code")].map((code) => code.textContent).join(" ")),
    }))
    const rarity = (word) => 1 / entries.filter((entry) => entry.words.has(word)).length
    const field = Object.assign(document.createElement("input"), {
      type: "search",
      placeholder: "Paste a message",
      ariaLabel: "Message",
      className: "message",
    })
    errors.querySelector("p").after(field)
    field.addEventListener("input", () => {
      const pasted = words(field.value)
      for (const entry of entries) {
        entry.score = [...entry.words].filter((word) => pasted.has(word)).reduce((sum, word) => sum + rarity(word), 0)
      }
      const best = Math.max(...entries.map((entry) => entry.score))
      for (const entry of entries) entry.item.hidden = entry.score < best / 2
      for (const group of errors.querySelectorAll("section")) group.hidden = !group.querySelector("li:not([hidden])")
    })
  }
}

// Tables become cards on a phone (site.css). In a first column an empty cell repeats the one above, and a number needs the
// column's header. The archive keeps tables.

if (!location.pathname.includes("/benchmarks/")) {
  for (const table of document.querySelectorAll(".table-wrapper > table")) {
    table.classList.add("cards")
    const headers = [...table.tHead.rows[0].cells].map((header) => header.textContent)
    let above = ""
    for (const row of table.querySelectorAll("tbody tr")) {
      ;[...row.cells].forEach((cell, column) => {
        if (!column && /^[\d.,\s-]+$/.test(cell.textContent)) cell.dataset.header = headers[0]
        if (!column) cell.textContent ? (above = cell.textContent) : (cell.dataset.above = above)
        else if (cell.textContent) cell.dataset.label = headers[column]
      })
    }
  }
}

// The page of the search has no heading.

const search = document.querySelector("#search-results")
search?.before(Object.assign(document.createElement("h1"), { textContent: "Search" }))

// Two asides need two names.

document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Pages")
