"""The style sheet of pages: light, dark, narrow, and printed.

Every pair of colours of text and ground has a contrast of 4.5 to 1 at least, of lines and ground
3 to 1 (WCAG 2.2, AA). Nothing is fetched: fonts are those of the reader.
"""

_LIGHT = (
    "--ink:#1a1d21;--quiet:#4b525b;--paper:#fff;--soft:#f2f4f7;--line:#c3c9d1;--axis:#5c6570;"
    "--accent:#0b5394;--shade:#d7e4f1;--warn:#a11212;--warn-paper:#fdeeee"
)
_DARK = (
    "--ink:#e6e8eb;--quiet:#aeb6c0;--paper:#15181c;--soft:#1f242a;--line:#444c56;--axis:#8d96a0;"
    "--accent:#7db7f0;--shade:#26384b;--warn:#ff9d94;--warn-paper:#391a1a"
)

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
*{{box-sizing:border-box}}
body{{font-family:system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;line-height:1.55;
color:var(--ink);background:var(--paper);max-width:66rem;margin:0 auto;padding:1.5rem 1.25rem 4rem;
overflow-wrap:anywhere}}
p,ul,nav,dl{{max-width:46rem}}
h1{{font-size:1.9rem;line-height:1.2;margin:.5rem 0 1rem}}
h2{{font-size:1.3rem;line-height:1.3;margin:2.5rem 0 .6rem;scroll-margin-top:1rem}}
a{{color:var(--accent)}}
a:focus-visible{{outline:3px solid var(--accent);outline-offset:2px}}
nav ol{{columns:2;gap:2rem;margin:0;padding:.8rem 1rem .8rem 2.4rem;background:var(--soft);
border-radius:.4rem}}
nav li{{padding:.15rem 0;break-inside:avoid}}
.loud{{border:2px solid var(--warn);border-left-width:.5rem;background:var(--warn-paper);
color:var(--ink);padding:.7rem .9rem;font-weight:600}}
dl{{margin:0 0 1rem;border-top:1px solid var(--line)}}
dl div{{display:grid;grid-template-columns:12rem 1fr;gap:1rem;padding:.35rem 0;
border-bottom:1px solid var(--line)}}
dt{{font-weight:600}}
dd{{margin:0}}
table{{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums;max-width:100%}}
caption{{text-align:left;font-weight:600;padding:.3rem 0}}
th,td{{text-align:left;vertical-align:top;padding:.4rem .6rem;border-bottom:1px solid var(--line)}}
thead th{{vertical-align:bottom;border-bottom:2px solid var(--axis);overflow-wrap:normal}}
tbody th{{font-weight:500}}
tfoot th,tfoot td{{border-top:2px solid var(--axis);border-bottom:0;font-weight:600}}
.wide{{width:100%;font-size:.88rem;overflow-wrap:break-word}}
.wide th,.wide td{{padding:.4rem .45rem}}
.wide tbody th{{min-width:9.5em;overflow-wrap:anywhere}}
.number{{text-align:right;overflow-wrap:normal}}
.kept{{white-space:nowrap}}
.pictures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));
gap:1.5rem;margin:1rem 0}}
figure{{margin:0;break-inside:avoid}}
figcaption{{color:var(--quiet);font-size:.92rem;margin-top:.4rem}}
svg{{display:block;width:100%;height:auto;font:13px system-ui,"DejaVu Sans",sans-serif}}
svg text{{fill:var(--ink)}}
svg .axis{{stroke:var(--axis);fill:none}}
svg .grid{{stroke:var(--line);fill:none}}
svg .curve{{stroke:var(--accent);stroke-width:2.5;fill:none;stroke-linejoin:round}}
svg .mark{{fill:var(--accent)}}
svg .limit{{stroke:var(--warn);stroke-width:2;stroke-dasharray:7 4;fill:none}}
svg .chance{{stroke:var(--axis);stroke-width:1.5;stroke-dasharray:2 4;fill:none}}
svg .shade{{fill:var(--shade)}}
svg .ground{{fill:var(--paper)}}
@media screen and (max-width:44rem){{
nav ol{{columns:1}}
dl div{{grid-template-columns:1fr;gap:0}}
}}
@media screen and (max-width:63rem){{
.wide,.wide tbody,.wide tfoot,.wide tr,.wide th,.wide td,.wide caption{{display:block;width:100%}}
.wide{{font-size:1rem;overflow-wrap:anywhere;max-width:46rem}}
.wide thead{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);
white-space:nowrap}}
.wide tr{{border:1px solid var(--line);border-radius:.4rem;padding:.5rem .8rem;margin:.6rem 0}}
.wide th,.wide td,.wide tfoot th,.wide tfoot td{{border:0;padding:.15rem 0;text-align:left}}
.wide tbody th,.wide tfoot th{{min-width:0;font-weight:700;border-bottom:1px solid var(--line)}}
.wide td{{display:grid;grid-template-columns:minmax(7rem,9.5rem) 1fr;gap:.8rem}}
.wide td::before{{content:attr(data-column);color:var(--quiet);font-weight:400}}
.wide td:empty{{display:none}}
}}
@media print{{
@page{{size:A4;margin:16mm 14mm}}
body{{font-size:9.5pt;max-width:none;padding:0}}
nav{{display:none}}
h1{{font-size:18pt}}
h2{{font-size:12.5pt;margin-top:1.4rem;break-after:avoid}}
p,ul,dl{{max-width:none;orphans:3;widows:3}}
th,td{{padding:.2rem .5rem}}
figcaption{{font-size:8.5pt}}
.wide{{font-size:7.6pt}}
.wide th,.wide td{{padding:.25rem .3rem}}
thead{{display:table-header-group}}
tfoot{{display:table-row-group}}
tr,.loud,dl div,li{{break-inside:avoid}}
.pictures{{grid-template-columns:1fr 1fr}}
.loud,svg .shade{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
}}
"""
