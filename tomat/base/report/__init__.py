"""What a report says, apart from how it looks; its Markdown and terminal forms; pages that tomat and people share."""
