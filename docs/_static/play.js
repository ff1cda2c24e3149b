// docs/play.md: three figures that react to the reader. play_data.js has their numbers.

{
  const { epsilons, names, exact, fits, sizes, people, game } = window.PLAY
  const WIDTH = 480

  const element = (name, attributes = {}, ...children) => {
    const found = Object.assign(document.createElement(name), attributes)
    found.append(...children)
    return found
  }
  const shape = (name, attributes = {}, text = "") => {
    const found = document.createElementNS("http://www.w3.org/2000/svg", name)
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value)
    found.textContent = text
    return found
  }
  const figure = (height) => shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img" })
  const label = (x, y, text, anchor = "middle") => shape("text", { x, y, "text-anchor": anchor }, text)
  const line = (x1, y1, x2, y2, kind) => shape("line", { x1, y1, x2, y2, class: kind })
  const marker = (cx, cy, kind, full) => shape("circle", { cx, cy, r: 4.5, class: full ? kind : `${kind} hollow` })
  const axis = (low, high, from, to) => (value) => from + ((value - low) / (high - low)) * (to - from)
  const counted = (number) => number.toLocaleString("en")

  const slider = (redraw) => {
    const range = element("input", { type: "range", min: 0, max: epsilons.length - 1, value: epsilons.indexOf(1) })
    const value = element("output", { value: "1" })
    range.addEventListener("input", () => {
      value.value = epsilons[range.value]
      range.setAttribute("aria-valuetext", value.value)
      redraw()
    })
    return { range, row: element("label", {}, "epsilon ", range, " ", value) }
  }
  const choice = (text, options, chosen, redraw) => {
    const select = element("select", {}, ...options.map((each) => element("option", { value: each }, String(each))))
    select.value = chosen
    select.addEventListener("change", redraw)
    return { select, row: element("label", {}, `${text} `, select) }
  }
  const button = (text, act) => {
    const found = element("button", { type: "button" }, text)
    found.addEventListener("click", act)
    return found
  }
  const said = () => element("p", { ariaLive: "polite" })

  const turnEpsilon = (place) => {
    const [low, high, top, row, left] = [-3, 4, 8, 28, 200]
    const bottom = top + row * names.length
    const plot = figure(bottom + 40)
    const x = axis(low, high, left, WIDTH - 10)
    const within = (value) => x(Math.min(high, Math.max(low, value)))
    const text = said()
    let noise = 0
    const interval = (mean, sd, y, kind, full) => [
      line(within(mean - 1.96 * sd), y, within(mean + 1.96 * sd), y, kind),
      ...(mean > low && mean < high ? [marker(x(mean), y, kind, full)] : []),
    ]
    const draw = () => {
      const epsilon = epsilons[range.value]
      const fit = fits[range.value][noise]
      plot.replaceChildren(
        ...[-2, 0, 2, 4].flatMap((tick) => [line(x(tick), top, x(tick), bottom, "grid"), label(x(tick), bottom + 17, tick)]),
        label(WIDTH / 2, bottom + 36, "effect on the log odds: mean and 95% interval"),
        ...names.flatMap((name, n) => [
          label(left - 8, top + row * (n + 0.65), name, "end"),
          ...interval(exact.mean[n], exact.sd[n], top + row * (n + 0.35), "exact", true),
          ...interval(fit.mean[n], fit.sd[n], top + row * (n + 0.7), "private", fit.status === "ok"),
        ]),
      )
      const held = names.filter((_, n) => Math.abs(fit.mean[n] - exact.mean[n]) <= 1.96 * fit.sd[n]).length
      const factor = Math.exp(epsilon)
      text.textContent = `${held} of ${names.length} private intervals hold the exact mean. Status: ${fit.status}. ` +
        `An attacker's odds change by a factor of at most ${factor.toPrecision(factor < 1000 ? 3 : 4)}, rare results aside.`
      plot.setAttribute("aria-label", text.textContent)
    }
    const { range, row: control } = slider(draw)
    const again = button("Other noise", () => {
      noise = (noise + 1) % fits[0].length
      draw()
    })
    place.append(element("p", {}, control, " ", again), plot, text)
    draw()
  }

  const howMany = (place) => {
    const [top, bottom, left] = [26, 216, 50]
    const plot = figure(bottom + 40)
    const x = axis(Math.log(sizes[0]), Math.log(sizes.at(-1)), left + 10, WIDTH - 20)
    const text = said()
    const draw = () => {
      const cell = people.find((each) => each.coefficients == coefficients.select.value && each.epsilon == budget.select.value)
      const limit = Number(most.select.value)
      const y = axis(0, Math.log(10), bottom, top)
      const at = (n) => [x(Math.log(sizes[n])), y(Math.log(Math.min(10, Math.max(1, cell.ratio[n]))))]
      const enough = (n) => cell.ratio[n] <= limit && cell.ok[n] >= 0.9
      plot.replaceChildren(
        ...[1, 2, 5, 10].flatMap((tick) => [line(left, y(Math.log(tick)), WIDTH - 10, y(Math.log(tick)), "grid"), label(left - 6, y(Math.log(tick)) + 4, tick, "end")]),
        ...[500, 2000, 10000, 50000].map((tick) => label(x(Math.log(tick)), bottom + 17, counted(tick))),
        label((left + WIDTH) / 2, bottom + 36, "people"),
        label(left, top - 12, "width / width without privacy", "start"),
        line(left, y(Math.log(limit)), WIDTH - 10, y(Math.log(limit)), "limit"),
        shape("polyline", { points: sizes.map((_, n) => at(n).join()).join(" "), class: "private" }),
        ...sizes.map((_, n) => marker(...at(n), "private", cell.ok[n] >= 0.9)),
      )
      const last = sizes.findLastIndex((_, n) => !enough(n)) // of the sizes that are too small
      let answer = `About ${counted(between(cell, last, limit))} people.`
      if (last < 0) answer = `${counted(sizes[0])} people or fewer.`
      if (last === sizes.length - 1) answer = `More than ${counted(sizes.at(-1))} people.`
      text.textContent = answer
      plot.setAttribute("aria-label", answer)
    }
    const coefficients = choice("coefficients", [...new Set(people.map((each) => each.coefficients))], 6, draw)
    const budget = choice("epsilon", [...new Set(people.map((each) => each.epsilon))], 1, draw)
    const most = choice("at most times as wide", [1.1, 1.25, 1.5, 2, 3], 1.25, draw)
    place.append(element("p", {}, coefficients.row, " ", budget.row, " ", most.row), plot, text)
    draw()
  }
  // On a line through logarithms; the larger size if its runs are ok and those of the smaller are not.
  const between = (cell, last, limit) => {
    if (cell.ratio[last] <= limit) return sizes[last + 1]
    const [a, b] = [cell.ratio[last], cell.ratio[last + 1]].map(Math.log)
    const share = (a - Math.log(limit)) / (a - b)
    const found = sizes[last] * (sizes[last + 1] / sizes[last]) ** share
    const unit = 10 ** Math.floor(Math.log10(found) - 1)
    return Math.min(sizes[last + 1], Math.ceil(found / unit) * unit)
  }

  const attacker = (place) => {
    const [top, bottom] = [20, 150]
    const plot = figure(bottom + 40)
    const [text, score] = [said(), said()]
    const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random())
    let [takesPart, published, right, rounds] = [false, 0, 0, 0]
    const play = () => {
      takesPart = Math.random() < 0.5
      published = (takesPart ? 1 : 0) + game[range.value].noise * normal()
      draw()
    }
    const draw = () => {
      const { noise, best } = game[range.value]
      const reach = Math.max(4 * noise, 1.5)
      const x = axis(0.5 - reach, 0.5 + reach, 10, WIDTH - 10)
      const bell = (centre, kind) => {
        const points = Array.from({ length: 121 }, (_, n) => 0.5 - reach + (reach * n) / 60)
        const height = (value) => bottom - (bottom - top) * Math.exp(-(((value - centre) / noise) ** 2) / 2)
        return shape("polyline", { points: points.map((value) => `${x(value)},${height(value)}`).join(" "), class: kind })
      }
      const seen = Math.min(0.5 + reach, Math.max(0.5 - reach, published))
      plot.replaceChildren(
        line(10, bottom, WIDTH - 10, bottom, "grid"),
        bell(0, "exact"),
        bell(1, "private"),
        label(x(0) - 6, top - 6, "without Alice", "end"),
        label(x(1) + 6, top - 6, "with Alice", "start"),
        line(x(seen), bottom, x(seen), top, "limit"),
        label(x(seen), bottom + 18, `published: ${published.toFixed(2)}`),
      )
      plot.setAttribute("aria-label", `The published number is ${published.toFixed(2)}. It is 0 without Alice and 1 with her, plus noise.`)
      score.textContent = `You were right in ${right} of ${rounds} rounds. The best attacker is right in ${(100 * best).toFixed(1)}% of them, and a coin in 50%.`
    }
    const guess = (yes) => () => {
      rounds += 1
      right += yes === takesPart
      text.textContent = `${yes === takesPart ? "Right" : "Wrong"}: Alice ${takesPart ? "took part" : "did not take part"}. Here is the next number.`
      play()
    }
    const { range, row } = slider(() => {
      right = rounds = 0
      text.textContent = ""
      play()
    })
    place.append(
      element("p", {}, row),
      plot,
      element("p", {}, button("Alice took part", guess(true)), " ", button("Alice did not", guess(false))),
      text,
      score,
    )
    play()
  }

  turnEpsilon(document.querySelector("#play-epsilon"))
  howMany(document.querySelector("#play-people"))
  attacker(document.querySelector("#play-attacker"))
}
