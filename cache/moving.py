"""Does an answer depend on the moment? The words and phrases that place a question in time.

A pure function of a prompt's last user text, in English, German, Spanish and French. It sees no
question that moves without such a word ("What is the date?"): a verifier's word and regenerations
that differ find those. Text in quotation marks is not looked at, nor is a question for the place or
the way to look something up, or what follows if the sender does something today: such answers stay.
"""

from __future__ import annotations

import re

_QUOTED = re.compile(r"\"[^\"\n]{1,80}\"|“[^”\n]{1,80}”|„[^“”\n]{1,80}[“”]|«[^»\n]{1,80}»")
_MOMENT = re.compile(
    r"""\b(?:
      (?<!from\ )today | tonight | tomorrow | (?<!since\ )yesterday | currently | nowadays | (?:right|just|until|as\ of)\ now
    | (?<!what\ )(?<!from\ )now(?=[\s?.!]*$) | yet(?=[\s?.!]*$) | so\ far | as\ of | (?:is|are|does|do|has|have)\ .{1,60}\ still
    | at\ (?:the\ moment|present|this\ (?:moment|time|point)) | lately | recently | latest | newest | upcoming | current
    | (?<!from\ )(?:this|last|next|past)\ (?:morning|afternoon|evening|night|week|weekend|month|quarter|year|hour|minutes?)
    | (?:in|within)\ the\ (?:last|past|next)\ \w+ | these\ days | any\ news
    | heute | (?<!ab\ )jetzt | gerade | derzeit | aktuell\w* | momentan | zurzeit | zur\ zeit | gegenwärtig | bisher | bislang
    | (?<!guten\ )morgen | (?<!seit\ )gestern | immer\ noch | noch\ nicht | im\ moment | neueste\w* | neuste\w*
    | diese[nrms]?\ (?:morgen|woche|monat|monats|jahr|jahres|abend|nacht|wochenende|stunde)
    | hoy | (?<!de\ )ahora | actualmente | actual(?:es)? | todavía | aún | (?<!la\ )mañana | (?<!desde\ )ayer
    | hasta\ (?:ahora|hoy|la\ fecha) | en\ este\ momento | última\ hora
    | est[ea]\ (?:mañana|tarde|noche|semana|mes|año|fin\ de\ semana)
    | aujourd['’]hui | maintenant(?=[\s?.!]*$) | actuellement | actuel(?:le)?s? | demain | (?<!depuis\ )hier
    | en\ ce\ moment | pour\ l['’]instant | jusqu['’](?:ici|à\ (?:présent|maintenant)) | récemment
    | ce\ (?:matin|soir|mois|week-end) | cet(?:te)?\ (?:après-midi|nuit|semaine|année) | à\ l['’]heure\ actuelle
    )\b""",
    re.VERBOSE,
)
_WHERE = re.compile(
    r"""^(?:if|wenn|si)\ (?:i|we|ich|wir)\b | (?:^¿?|[,;]\s*|\b(?:know|wissen|sagen|saber|savoir)\s+)(?:
      where\ (?:can|do|could|would|should)\ (?:i|we|one)\ (?:see|find|look|check|read|get) | how\ (?:can|do|could)\ (?:i|we|one)
      \ (?:see|find|look|check|read|know|tell)
    | (?:when\ can|why\ can(?:['’]?t|not))\ (?:i|we|one)\ (?:see|find|check|read) | what\ (?:does|do)\ .{1,60}\ (?:mean|include|stand\ for)
    | wo\ (?:kann|finde|sehe)\ (?:ich|man) | wie\ (?:kann|finde|sehe|erfahre)\ (?:ich|man) | was\ bedeutet
    | dónde\ (?:puedo|se\ puede|veo|encuentro) | cómo\ (?:puedo|se\ puede|veo)\ (?:ver|saber|consultar) | qué\ significa
    | où\ (?:puis|peut|est-ce\ que\ je\ peux|trouver|voir) | comment\ (?:puis|savoir|voir) | que\ signifie
    )\b""",
    re.VERBOSE,
)


_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def moves(text: str) -> bool:
    """Whether a question has a word or a phrase that places it in time: of a text with a question
    mark, its questions alone.
    """
    sentences = _SENTENCE.split(_QUOTED.sub(" ", " ".join(text.casefold().split())))
    questions = [sentence for sentence in sentences if sentence.endswith("?")] or sentences
    return any(_MOMENT.search(question) and not _WHERE.search(question) for question in questions)
