"""The only list of words: what asks, greets and thanks in four languages, and the names of small numbers.

A prompt means the same with these words and without them. The lists have no negation, no preposition,
no person and no word that changes what is asked. Another language has no list: its words are
differences, which verdicts may free.
"""

from __future__ import annotations

import re

# each language: articles and fillers | greetings and thanks | phrases that ask for a thing | phrases that ask for a way
_ENGLISH = """
    a an the please
  | hi; hello; hey; hi there; hello there; good morning; good afternoon; good evening; dear team; thanks; thank you; cheers;
    many thanks; thanks a lot; thank you very much; kind regards; best regards; thanks in advance; please
  | what is; what are; what s; whats; tell me; can you tell me; could you tell me; would you tell me; do you know;
    i want to know; i would like to know; i d like to know; i need to know; please tell me; let me know
  | how do i; how can i; how to; how would i; how do you; how can you; how do we; how can we; how does one
"""
_GERMAN = """
    ein eine einen der die das den bitte mal denn
  | hallo; hi; guten tag; guten morgen; guten abend; moin; servus; danke; vielen dank; besten dank; danke schön;
    mit freundlichen grüßen; viele grüße; liebe grüße; danke im voraus; bitte
  | was ist; was sind; was ist denn; sag mir; sagen sie mir; kannst du mir sagen; können sie mir sagen;
    ich möchte wissen; ich würde gerne wissen; weißt du; wissen sie
  | wie kann ich; wie kann man; wie mache ich; wie könnte ich; wie können wir
"""
_SPANISH = """
    un una el la los las
  | hola; buenos días; buenas tardes; buenas noches; buenas; gracias; muchas gracias; un saludo; saludos; por favor;
    gracias de antemano; saludos cordiales
  | qué es; cuál es; cuáles son; qué son; dime; me puedes decir; puedes decirme; podrías decirme; me podría decir;
    quiero saber; quisiera saber; me gustaría saber; sabes
  | cómo puedo; cómo se puede; cómo podría; cómo podemos; cómo hago para
"""
_FRENCH = """
    un une le la les l
  | bonjour; bonsoir; salut; merci; merci beaucoup; merci d avance; cordialement; bien à vous; s il vous plaît; s il te plaît;
    bonne journée
  | quel est; quelle est; quels sont; quelles sont; qu est ce que c est que; qu est ce que; dis moi; dites moi;
    peux tu me dire; pouvez vous me dire; pourriez vous me dire; je voudrais savoir; je veux savoir; sais tu; savez vous
  | comment puis je; comment peut on; comment est ce que je peux; comment pourrais je; comment peux je
"""

_LANGUAGES = [[part.split(";") for part in text.split("|")] for text in (_ENGLISH, _GERMAN, _SPANISH, _FRENCH)]


def _phrases(part_number: int) -> re.Pattern[str]:
    phrases = {" ".join(phrase.split()) for language in _LANGUAGES for phrase in language[part_number]}
    return re.compile(rf"(?:{'|'.join(sorted(phrases, key=len, reverse=True))})(?: |$)")


FILLERS = frozenset(word for language in _LANGUAGES for word in language[0][0].split())
COURTESIES, ASKING, ASKING_HOW = _phrases(1), _phrases(2), _phrases(3)
"""Each matches one phrase at the start of words that are joined by spaces."""

_NUMBERS = """
    zero null cero zéro|eins uno|two zwei dos deux|three drei tres trois|four vier cuatro quatre|five fünf cinco cinq
    |six sechs seis|seven sieben siete sept|eight acht ocho huit|nine neun nueve neuf|ten zehn diez dix|eleven elf once onze
    |twelve zwölf doce douze|thirteen dreizehn trece treize|fourteen vierzehn catorce quatorze|fifteen fünfzehn quince quinze
    |sixteen sechzehn dieciséis seize|seventeen siebzehn diecisiete|eighteen achtzehn dieciocho|nineteen neunzehn diecinueve
"""
_TENS = """
    twenty zwanzig veinte vingt|thirty dreißig treinta trente|forty vierzig cuarenta quarante|fifty fünfzig cincuenta cinquante
    |sixty sechzig sesenta soixante|seventy siebzig setenta|eighty achtzig ochenta|ninety neunzig noventa
"""
_LARGE = "hundred hundert cien cent|thousand tausend mil mille|million millionen millón|billion milliarde milliard"
NUMBERS = {word: value for value, names in enumerate(_NUMBERS.split("|")) for word in names.split()}
TENS = {word: 10 * value for value, names in enumerate(_TENS.split("|"), 2) for word in names.split()}
LARGE = {
    word: value
    for value, names in zip((100, 1000, 10**6, 10**9), _LARGE.split("|"), strict=True)
    for word in names.split()
}
